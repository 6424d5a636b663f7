"""Makes tasks from sessions, and proves them: the files of the start score 0, those that the user kept score 1."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from etude.errors import PrivacyError, TaskError
from etude.privacy import Captured, Level, PrivacyFolder
from etude.records.exports import CONFIGURATION
from etude.records.served import without_prefix
from etude.records.task import Answer, Task, Trust, Verifier
from etude.seams import Grader, Runtime
from etude.tasks.mining.commits import Trees, task_of_trees
from etude.tasks.mining.testing import holds_tests, is_test
from etude.tasks.proof import Export, fault
from etude.tasks.sessions.folders import Session, read_session
from etude.tasks.sessions.source import NAME
from etude.tasks.sessions.store import SessionStore, StoredSession
from etude.tasks.splits import split_of
from etude.tasks.verdicts import in_parallel

FAMILY = "session"
_MAX_TESTS = 120  # hidden tests of a task, each with its own deadline


@dataclass(frozen=True, slots=True)
class ImportedSession:
    """What became of a session: "task", "quarantined" (stored, but not used) or "refused" (not stored), and why."""

    name: str
    outcome: str
    reason: str = ""
    task_id: str = ""


async def import_sessions(
    folders: Sequence[Path],
    store: SessionStore,
    runtime: Runtime,
    grader: Grader,
    export: Export,
    *,
    concurrency: int = 2,
    on_session: Callable[[ImportedSession], None] = lambda _: None,
) -> list[ImportedSession]:
    """Read sessions, make tasks of them, prove these in machines, and store the results. In the order of `folders`.

    A session that is stored already and has not changed is not proven again. `on_session` is called after each. Raises
    `PrivacyError` if the store cannot be used, and the errors of the runtime."""

    async def one(folder: Path) -> ImportedSession:
        result = await _import(folder, store, runtime, grader, export)
        on_session(result)
        return result

    return await in_parallel(folders, one, concurrency)


async def _import(
    folder: Path, store: SessionStore, runtime: Runtime, grader: Grader, export: Export
) -> ImportedSession:
    try:
        session = read_session(folder)
        captured = _record(session, store.privacy)
        digest = _digest(session, store.privacy)
        stored = store.read(captured.record_id) if store.digest_of(captured.record_id) == digest else None
        if stored is None:
            stored = await _prove(session, captured, store.privacy, runtime, grader, export)
            if not store.add(captured, stored, digest):
                return ImportedSession(folder.name, "refused", "its subject has withdrawn")
    except TaskError as error:
        reason = f"{error.what}: {error.facts}" if error.facts else error.what
        return ImportedSession(folder.name, "refused", f"{reason} (hint: {error.hint})")
    if stored.task is None:
        return ImportedSession(folder.name, "quarantined", stored.reason)
    return ImportedSession(folder.name, "task", task_id=stored.task.task_id)


def _record(session: Session, privacy: PrivacyFolder) -> Captured:
    """Return the record of a session's last response. Raises `TaskError` if it may not be trained on."""
    found = privacy.records.of_response(without_prefix(session.response))
    if not found:
        hint = "only sessions of captured responses become tasks: etude serve --capture, etude privacy set"
        raise TaskError(f"the response {session.response[:80]!r} is not captured", hint=hint)
    usable = privacy.usable([one.record_id for one in found], Level.TRAIN)
    if not usable:
        hint = "only sessions of subjects at the level train become tasks"
        raise TaskError(f"the subject of {session.response[:80]!r} does not allow training", hint=hint)
    return next(one for one in found if one.record_id in usable)


def _digest(session: Session, privacy: PrivacyFolder) -> str:
    """Return a keyed digest of a session. Without the key, nobody can test which files a session had."""
    content = [session.response, session.check, session.deadline_s]
    trees = [sorted(tree.items()) for tree in (session.before, session.after, session.hidden)]
    secret = privacy.keys.derive("sessions")
    return hmac.new(secret, msgspec.json.encode([content, trees]), "sha256").hexdigest()[:32]


async def _prove(
    session: Session, captured: Captured, privacy: PrivacyFolder, runtime: Runtime, grader: Grader, export: Export
) -> StoredSession:
    """Return a session as a proven task, or with the reason why it is none."""
    try:
        instruction = instruction_of(msgspec.json.decode(privacy.records.read(captured).messages))
    except (PrivacyError, msgspec.DecodeError) as error:
        return StoredSession(name=session.name, reason=f"its conversation cannot be read: {error}")
    if not instruction:
        return StoredSession(name=session.name, reason="its conversation has no text of the user")
    if not session.changed:
        return StoredSession(name=session.name, reason="the user kept nothing: before/ and after/ are equal")
    made = _checked(session, instruction) if session.check else await _tested(session, instruction, runtime)
    if isinstance(made, str):
        return StoredSession(name=session.name, reason=made)
    task, answer = made
    # All sessions of a subject are one problem, in one split: they are about the same files.
    of_subject = {"split": split_of(captured.subject), "problem": captured.subject}
    task = msgspec.structs.replace(task, instruction=instruction, **of_subject)
    reason = await fault(grader, task, answer, 60 + session.deadline_s * _MAX_TESTS, export)
    if reason:
        return StoredSession(name=session.name, reason=f"not valid: {reason}")
    return StoredSession(name=session.name, task=task, answer=answer)


def instruction_of(messages: Any) -> str:
    """Return what the user wrote in a conversation: the texts of all messages with the role "user", in order.

    >>> instruction_of([{"role": "system", "content": "..."}, {"role": "user", "content": "Fix it."},
    ...                 {"role": "assistant", "content": "Done."}, {"role": "user", "content": "And test it."}])
    'Fix it.\\n\\nAnd test it.'
    """
    if isinstance(messages, str):
        return messages.strip()
    if not isinstance(messages, list):
        return ""
    texts = [one.get("content") for one in messages if isinstance(one, dict) and one.get("role") == "user"]
    return "\n\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _checked(session: Session, instruction: str) -> tuple[Task, Answer]:
    """Return the task whose verifier is the product's own command."""
    paths = {*session.before, *session.after}
    exports = sorted({f"{path.partition('/')[0]}/" if "/" in path else path for path in paths})
    task = Task(
        source=NAME,
        split=split_of(session.response),
        index=0,
        family=FAMILY,
        instruction=instruction,
        files=dict(session.before),
        exports=tuple(exports),
        trust=Trust.CODE,
    )
    verifier = Verifier(files=dict(session.hidden), argv=session.check, deadline_s=session.deadline_s)
    return task, Answer(reference={path: session.after[path] for path in session.changed}, verifier=verifier)


async def _tested(session: Session, instruction: str, runtime: Runtime) -> tuple[Task, Answer] | str:
    """Return the task whose hidden tests are those of the files that the user kept, or why there is none."""
    tests = tuple(path for path in session.after if is_test(path) or PurePosixPath(path).name in CONFIGURATION)
    if not any(holds_tests(path) for path in tests):
        return "nothing checks it: after/ has no test files, and session.toml no check"
    code = tuple(path for path in session.changed if path.endswith(".py") and path not in tests)
    if not code:
        return "it changes no Python outside tests: its check must be a command in session.toml"
    rest = tuple(path for path in session.changed if path not in tests and path not in code)
    trees = Trees(dict(session.before), dict(session.after), tests, code, rest)
    made = await task_of_trees(trees, instruction, runtime, source=NAME, family=FAMILY, deadline_s=session.deadline_s)
    return made if isinstance(made, str) else (made.task, made.answer)
