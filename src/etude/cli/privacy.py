"""The commands ``etude privacy show``, ``set``, ``erase``, ``export`` and ``expire``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import glob
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from etude.cli.locations import open_ledger, open_run
from etude.errors import InputError, LedgerError, PrivacyError, StoreError
from etude.privacy import Captured, Content, Level, PrivacyFolder, Subject, redact_value
from etude.privacy.folder import OUTCOMES
from etude.privacy.subjects import SubjectDigests
from etude.run import RunFolder

SESSIONS = "sessions.sqlite"  # the name of `tasks.sessions.store.FILE`, whose module takes long to load


def show(args: argparse.Namespace) -> int:
    """Print the consent of one subject with its history, or of all organisations with the counts of capture. Returns
    0."""
    with _open(args.folder) as folder:
        if args.subject is None:
            for name, (level, num_users) in folder.consent.organisations().items():
                print(f"{name}: {level}; users with a level of their own: {num_users}")
            counts = ", ".join(f"{number} {name}" for name, number in folder.records.counts().items())
            print(f"served answers: {counts or 'none yet'}")
            return 0
        subject = Subject.parse(args.subject)
        chosen = folder.consent.chosen(subject)
        print(f"{subject}: {folder.consent.level(subject)} (own choice: {'none' if chosen is None else chosen})")
        for change in folder.consent.history(subject):
            print(f"  {_time(change.at)} {change.level}")
        found = folder.records.of(folder.keys.names(subject))
        levels = ", ".join(f"{number} {level}" for level, number in sorted(Counter(r.level for r in found).items()))
        print(f"records: {len(found)}" + (f" ({levels}), from {_time(found[0].at)}" if found else ""))
    return 0


def set_level(args: argparse.Namespace) -> int:
    """Set the consent level of a subject, and print the level that is now in force. Creates the folder if needed.
    Returns 0."""
    subject, level = Subject.parse(args.subject), Level.parse(args.level)
    with PrivacyFolder(args.folder) as folder:
        now = folder.consent.set(subject, level)
    print(f"{subject}: {now}")
    if now is not level:
        told = "its organisation's level is lower" if subject.user else "the level of one of its users is lower"
        print(f"  set to {level}, but {told}" + ("" if subject.user else ": it holds where no user is named"))
    return 0


def erase(args: argparse.Namespace) -> int:
    """Erase a subject, also from the files of runs, and print which records, rollouts, batches and versions hold its
    data. Warns if nothing was known of the subject.

    Returns 0, or 1 if the ledger and the traces of a run disagree about the rollouts with its data, a trace cannot be
    changed, or a file of signals is missing."""
    subject = Subject.parse(args.subject)
    runs = [open_run(path) for path in args.run]
    with _open(args.folder) as folder:
        tables = dict(folder.records.attached())
        done = folder.erase(subject, unlink=_unlink_outcomes)
        names = folder.keys.names(subject)
    tasks = _session_tasks(args.folder, names)
    print(f"erased {subject}: {done.num_keys} keys destroyed, {len(done.records)} records deleted; its level is off")
    if not done.found:
        _warn_of_unknown(subject)
    for path, number in done.attached.items():
        print(f"{path}: {number} {_of_file(path)} deleted")
    for path, number in done.unlinked.items():
        print(f"{path}: {number} outcomes made unlinkable; they still count")
    for path in done.missing:
        hint = f"put it back and erase again; if it was deleted for good: touch {path}"
        what = "outcomes were not unlinked" if tables[path] == OUTCOMES else f"{_of_file(path)} were not deleted"
        print(f"error: {path} is missing: its {what}\n  hint: {hint}", file=sys.stderr)
    print(f"rollouts that hold its data: {', '.join(done.rollouts) or 'none'}")
    if tasks:
        print(f"tasks that were made from its sessions: {', '.join(sorted(tasks))}")
    agree = [_erase_from(run, {*done.rollouts, *_rollouts_of(run, tasks)}) for run in runs]
    return 0 if all(agree) and not done.missing else 1


def _unlink_outcomes(path: Path, subjects: Collection[str]) -> int:
    from etude.releases import Releases

    with contextlib.closing(Releases(path)) as releases:
        return releases.unlink(subjects)


def _of_file(path: Path) -> str:
    """Return what the rows of an attached file are."""
    return "sessions" if path.name == SESSIONS else "signals"


def _rollouts_of(run: RunFolder, tasks: Collection[str]) -> set[str]:
    from etude.experience.auditing import rollouts_of_tasks
    from etude.loop.locations import traces_folder

    return rollouts_of_tasks(open_ledger(run), traces_folder(run), tasks) if tasks else set()


def _session_tasks(path: Path, names: SubjectDigests) -> set[str]:
    """Return the ids of the tasks that were made from a subject's sessions."""
    from etude.tasks.sessions.store import SessionStore

    if not (path / SESSIONS).is_file():
        return set()
    with SessionStore(path) as store:
        return store.tasks_of(names)


def _erase_from(run: RunFolder, rollouts: Collection[str]) -> bool:
    """Print the batches and versions of a run that hold rollouts, and delete their tokens from its files.

    Returns whether its traces name no others, and all tokens were deleted."""
    from etude.experience.auditing import steps_of
    from etude.experience.trace_erasure import erase_rollouts
    from etude.experience.traces import trace_path
    from etude.loop.locations import traces_folder
    from etude.rollouts.logs import FOLDER as LOGS

    rows = open_ledger(run).find_rows(rollouts)
    for row in rows:
        batch = "in no batch" if row.step is None else f"in the batch of step {row.step}"
        version = "in no version" if row.version is None else f"trained into {row.version} and all after it"
        print(f"  {run.path}: {row.rollout_id} ({row.state}) {batch}, {version}")
    told = {(row.rollout_id, row.step) for row in rows}
    wanted, complete = set(rollouts), True
    folder = traces_folder(run)
    traced = {(i, step) for step, ids in steps_of(folder, sys.maxsize) for i in ids if i in wanted}
    for rollout_id, step in sorted(traced - told):
        print(f"  {run.path}: {rollout_id} is also in the trace of step {step}, which the ledger does not name")
    for step in sorted({step for _, step in (*traced, *told) if step is not None}):
        path = trace_path(folder, step)
        if not path.exists():
            continue
        try:
            gone = erase_rollouts(path, wanted)
        except (LedgerError, StoreError) as error:
            complete = False
            print(f"error: tokens may still be readable in the trace of step {step}: {error.what}: {error.facts}\n"
                  f"  hint: delete {path}, or repair it and erase again", file=sys.stderr)  # fmt: skip
            continue
        if gone:
            print(f"  {run.path}: tokens of {len(gone)} rollouts deleted from the trace of step {step}: it cannot be"
                  " replayed")  # fmt: skip
    for rollout_id in sorted(wanted):
        names = ("rollouts", rollout_id), (LOGS, quote(rollout_id, safe=""))
        for file in sorted(file for place, name in names for file in (run / place).glob(f"{glob.escape(name)}.*")):
            file.unlink(missing_ok=True)
            print(f"  {run.path}: deleted {file}")
    agree = traced <= told
    named = "names all" if agree else "lacks some"
    print(f"  {run.path}: its traces hold {len(traced)}; the ledger {named} of them")
    return agree and complete


def export(args: argparse.Namespace) -> int:
    """Print the records, signals and sessions that are kept of a subject, one line of JSON each.

    Reports on standard error what cannot be read, and warns if nothing is known of the subject.

    Returns 0, or 1 when a record, a file or a session could not be read."""
    subject, unreadable, num = Subject.parse(args.subject), 0, 0
    with _open(args.folder) as folder:
        names = folder.keys.names(subject)
        for captured in folder.records.of(names):
            try:
                content = folder.records.read(captured)
            except PrivacyError as error:
                print(f"error: {error}", file=sys.stderr)
                unreadable += 1
                continue
            num += 1
            print(json.dumps(_exported(captured, content, redacted=args.redacted), ensure_ascii=False))
        attached = [one for one in folder.records.attached() if one[1] != OUTCOMES]  # they have no subject's name
        known = folder.consent.has_levels(names)
    for path, _ in attached:
        try:
            told = list(_kept_in(path, args.folder, names, redacted=args.redacted))
        except PrivacyError as error:
            print(f"error: {error}", file=sys.stderr)
            unreadable += 1
            continue
        num += len(told)
        for one in told:
            print(json.dumps(one, ensure_ascii=False))
    if not (num or unreadable or known):
        _warn_of_unknown(subject)
    return 1 if unreadable else 0


def _kept_in(path: Path, privacy: Path, names: SubjectDigests, *, redacted: bool) -> Iterator[dict[str, object]]:
    """Yield the signals or sessions of a subject in a file that belongs to a privacy folder.

    Raises `PrivacyError` if the file is missing or cannot be read."""
    if not path.is_file():
        hint = "put it back and export again; if it was deleted for good, it has nothing of the subject"
        raise PrivacyError(f"{path} is missing: its {_of_file(path)} are not exported", hint=hint)
    if path.name == SESSIONS:
        from etude.tasks.sessions.store import SessionStore

        with SessionStore(privacy) as store:
            for record_id, session in store.sessions_of(names):
                content = msgspec.to_builtins({"task": session.task, "answer": session.answer})
                facts = {"session": session.name, "record": record_id, "reason": session.reason, **content}
                yield redact_value(facts) if redacted else facts
        return
    from etude.signals.store import SignalStore

    column = "organisation" if names.is_organisation else "subject"
    with contextlib.closing(SignalStore(path)) as signals:
        for one in signals.signals(f"s.{column} = ?", [names.subject]):
            yield {
                "signal": one.name,
                "value": one.value,
                "response": one.response_id,
                "answer": one.answer,
                "level": None if one.level is None else str(one.level),
                "time": _time(one.at),
                "received": _time(one.received),
                "version": one.version,
            }


def _warn_of_unknown(subject: Subject) -> None:
    what = f"nothing was found for {subject}: no level of its own, no key, no record and no signal"
    hint = "check the name; etude privacy show lists the organisations"
    print(f"warning: {what}\n  hint: {hint}", file=sys.stderr)


def expire(args: argparse.Namespace) -> int:
    """Delete expired records, and print their number. Returns 0."""
    with _open(args.folder) as folder:
        print(f"{folder.records.expire()} records deleted")
    return 0


def _open(path: Path) -> PrivacyFolder:
    if not (path / "consent.sqlite").is_file():
        hint = "give the folder of etude serve --capture: --folder DIR; etude privacy set creates it"
        raise InputError(f"{path} is not a folder of consent and captured records", hint=hint)
    return PrivacyFolder(path)


def _exported(captured: Captured, content: Content, *, redacted: bool) -> dict[str, object]:
    """Return a record as JSON. Redacted, it has no token ids and log-probabilities: tokens are the text again."""
    facts = {
        "record": captured.record_id,
        "response": captured.response_id,
        "answer": captured.answer,
        "level": str(captured.level),
        "time": _time(captured.at),
        "expires": _time(captured.expires),
        "model": captured.model,
        "version": captured.version,
        "dialect": content.dialect,
        "finish": content.finish,
        "prompt_tokens": content.num_prompt,
        "sampled_tokens": content.num_sampled,
    }
    texts = {name: json.loads(data) for name in ("messages", "reply") if (data := getattr(content, name))}
    if redacted:
        if isinstance(texts.get("messages"), list) and all(isinstance(one, int) for one in texts["messages"]):
            del texts["messages"]  # a prompt of token ids
        return {**facts, **redact_value(texts)}
    arrays = {name: getattr(content, name) for name in ("prompt_ids", "token_ids", "logprobs")}
    return {**facts, **texts, **{name: array.tolist() for name, array in arrays.items() if array is not None}}


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat(timespec="seconds")
