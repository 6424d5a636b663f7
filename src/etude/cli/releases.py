"""The commands ``etude release begin``, ``gate``, ``advance``, ``observe``, ``list``, ``why``, ``promote``, ``hold``,
``resume`` and ``rollback``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, cast

from etude.cli.feedback import opened_feedback
from etude.cli.locations import open_run
from etude.cli.store_locations import existing_store, is_same_store
from etude.errors import Exit, InputError, StoreError
from etude.evals.suites import read_suite
from etude.prices import read_prices
from etude.privacy import PrivacyFolder
from etude.releases import Decision, Release, Releases, check_gate
from etude.releases.costs import Costs
from etude.releases.feedback import CostReader, outcomes_of
from etude.releases.gate import Played, loop_evals, read_parity, read_played
from etude.releases.outcomes import read_outcomes
from etude.releases.releases import LOOP
from etude.releases.settings import read_settings
from etude.releases.states import State
from etude.releases.undecided import missing_checks
from etude.seams import BlobStore
from etude.signals import FeedbackFile
from etude.stores import open_store
from etude.weights.chain import inspect, signing
from etude.weights.chain.history import stored

CHANNEL = "policy"  # of a run's weights


def begin(args: argparse.Namespace) -> int:
    """Begin a release of a stored version of a channel. Returns 0."""
    settings, store = read_settings(args.settings, args.set), existing_store(args.store)
    inspect.require_channel(store, args.name)
    version = inspect.find(store, args.version, args.name).version
    location = args.store if "://" in args.store else str(Path(args.store).absolute())
    with _opened(args, create=True) as releases:
        found = releases.begin(store, version, settings, channel=args.name, location=location, now=time.time())
    print(f"release {found.number}: {found.candidate} against {found.stable}; next: etude release gate")
    return Exit.DONE


def gate(args: argparse.Namespace) -> int:
    """Compare evaluations of candidate and stable version. Returns 0 if the candidate passes, 1 if it is refused.

    With `--run`, a suite is refused if the run was trained on one of its tasks."""
    with _opened(args) as releases:
        release, played = releases.newest(), dict[str, tuple[Played, Played]]()
        for one in release.settings.gate:
            suite = read_suite(one.suite)
            if args.run is not None:
                from etude.loop.suites import check_suite

                check_suite(one.suite, open_run(args.run))
            labels = (args.candidate, args.stable)
            played[one.suite] = (*(read_played(args.evals, suite.name, label) for label in labels),)  # type: ignore[assignment]
        parity = read_parity(args.parity) if args.parity else None
        result = check_gate(release.settings, release.candidate, release.stable, played, parity=parity)
        found = releases.gate(result, now=time.time())
    for report in result.suites:
        print(
            f"{report.suite}: {report.value:+.3f} ({report.low:+.3f} to {report.high:+.3f}), margin {report.margin:g}"
        )
    for failure in result.failures:
        print(f"not passed: {failure}")
    print(_line(found))
    return Exit.FAILED if result.failures else Exit.DONE


def advance(args: argparse.Namespace) -> int:
    """Complete a transition that was interrupted, or let the rules decide the next step of the newest release. Returns
    0."""
    with _opened(args) as releases:
        costs = _costs(args, releases, releases.newest())
        release, found = releases.advance(_store(releases), now=time.time(), costs=costs)
    print(_line(release))
    if found is not None:
        _print_decision(found)
    return Exit.DONE


def observe(args: argparse.Namespace) -> int:
    """Store outcomes of users from a file of JSON lines, or from signals about answers. Returns 0."""
    if (args.outcomes is None) == (args.feedback is None):
        raise InputError("give either a file of outcomes or --feedback", hint="etude release observe --feedback FILE")
    with _opened(args) as releases:
        if args.feedback is None:
            outcomes = list(read_outcomes(args.outcomes))
        else:
            release = releases.newest()
            metrics = {metric.name for metric in release.settings.metrics}
            with opened_feedback(args.feedback, args.capture) as file:
                file.attach_outcomes(args.file)
                outcomes = list(outcomes_of(file.signals(since=releases.share_since(release)), metrics))
        num = releases.observe(outcomes, now=time.time())
    print(f"{num} of {len(outcomes)} outcomes are new and count")
    return Exit.DONE


def list_releases(args: argparse.Namespace) -> int:
    """Print a line for each release, the newest last. Returns 0."""
    with _opened(args) as releases:
        for one in releases.all():
            print(_line(one))
    return Exit.DONE


def why(args: argparse.Namespace) -> int:
    """Print every transition of a release with its reason, and the present decision of the rules. Returns 0.

    For a candidate it prints the checks of the gate that cannot be made yet, each with its reason and a hint."""
    with _opened(args) as releases:
        release = releases.newest() if args.number is None else _numbered(releases, args.number)
        print(_line(release))
        transitions = releases.why(release.number)
        for one in transitions:
            share = f" at {one.share} %" if one.share else ""
            print(f"{_time(one.at)}  {one.state}{share}, by {one.by}: {one.reason}")
        if release.pending is not None:
            print(f"{_time(release.pending.at)}  decided, and not yet done: {release.pending.state}:"
                  f" {release.pending.reason}; complete it: etude release advance")  # fmt: skip
        elif release.state is State.CANDIDATE:
            _print_gate(release, [args.evals, loop_evals(args.file)], by_loop=transitions[0].by == LOOP)
        elif release.share:
            _print_decision(releases.look(release, now=time.time(), costs=_costs(args, releases, release)))
    return Exit.DONE


def refuse_other_releases(path: Path, location: str) -> None:
    """Raise `InputError` unless the newest release in `path`, if any, is of the weights at `location`.

    If no store is left where the release says, the store at `location` must have its candidate."""
    with contextlib.closing(Releases(path)) as releases:
        found = releases.all()[-1:]
    for release in found:
        same = is_same_store(release.location, location)
        if same is None:
            same = any(stored(open_store(location, readonly=True), CHANNEL, release.candidate))
        if not same or release.channel != CHANNEL:
            raise InputError(
                f"{path} has releases of other weights",
                f"release {release.number} is of channel {release.channel!r} in {release.location};"
                f" this run has its weights in {location}",
                hint="give the file of this run's releases (that of its etude learn --releases), or a new one for"
                " etude learn",
            )


def promote(args: argparse.Namespace) -> int:
    """Make the candidate of the newest release the stable version. Returns 0."""
    with _opened(args) as releases:
        print(_line(releases.promote(_store(releases), reason=args.reason, now=time.time())))
    return Exit.DONE


def rollback(args: argparse.Namespace) -> int:
    """Give all users the version from before the newest release. Returns 0.

    It takes effect also while the store is away: then `StoreError` is raised, and the same command, or `advance`, moves
    the pointers later."""
    with _opened(args) as releases:
        try:
            store = _store(releases)
        except InputError as error:
            store = cast("BlobStore", _Away(error))
        print(_line(releases.rollback(store, reason=args.reason, now=time.time())))
    return Exit.DONE


def hold(args: argparse.Namespace) -> int:
    """Keep the canary of the newest release at its share until an operator decides. Returns 0."""
    with _opened(args) as releases:
        print(_line(releases.hold(reason=args.reason, now=time.time())))
    return Exit.DONE


def resume(args: argparse.Namespace) -> int:
    """Continue the newest release, which was held. Returns 0."""
    with _opened(args) as releases:
        print(_line(releases.resume(reason=args.reason, now=time.time())))
    return Exit.DONE


@contextlib.contextmanager
def _opened(args: argparse.Namespace, *, create: bool = False) -> Iterator[Releases]:
    """The releases of `--file`. Raises `InputError` if it does not exist and is not to be created."""
    if not create and not args.file.is_file():
        raise InputError(
            f"{args.file} does not exist", hint="give --file, or begin a release: etude release begin STORE VERSION"
        )
    key = getattr(args, "key", None)
    releases = Releases(args.file, signer=signing.read_signer(key))
    try:
        yield releases
    finally:
        releases.close()


class _Away:
    """A store that is not where the release says. Every use of it raises `StoreError`."""

    def __init__(self, error: InputError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        facts = "no user gets the canary any more; the pointers of the store have not moved"
        hint = "bring the store back, then: etude release advance"
        raise StoreError(self._error.what, facts, hint=hint)


def _store(releases: Releases) -> BlobStore:
    return existing_store(releases.newest().location)


def _numbered(releases: Releases, number: int) -> Release:
    found = {one.number: one for one in releases.all()}
    if number not in found:
        raise InputError(f"there is no release {number}", hint=f"their numbers are 1 to {len(found)}")
    return found[number]


def _line(one: Release) -> str:
    share = f" at {one.share} %" if one.share else ""
    pending = f", {one.pending.state} not yet done" if one.pending is not None else ""
    return f"release {one.number}: {one.state}{share}{pending} since {_time(one.since)}: {one.candidate}"


def _print_decision(found: Decision) -> None:
    print(f"now: {found.action}: {found.reason}")
    for one in found.evidence:
        bounds = f"{one.value:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
        print(f"  {one.metric}: {bounds}, {one.canary} subjects against {one.stable}")

    for arm, cost in (found.costs or {}).items():
        bounds = "" if cost.low is None else f" ({cost.low:.3g} to {cost.high:.3g})"
        told = "unknown" if cost.value is None else f"{cost.value:.3g}{bounds}"
        print(
            f"  dollars per kept change, {arm}: {told}; {cost.kept:g} kept, {cost.answers} answers of {cost.subjects}"
            " users"
        )


def _costs(args: argparse.Namespace, releases: Releases, release: Release) -> Costs | None:
    """Return the dollars per kept change at the present share; None without --prices, and if nothing is compared."""
    if (args.prices is None) != (args.feedback is None):
        given, other = ("--prices", "--feedback") if args.feedback is None else ("--feedback", "--prices")
        facts = "dollars per kept change need prices of tokens and signals about answers"
        raise InputError(f"{given} needs {other}", facts, hint=f"add {other} FILE")
    if args.prices is None or release.share not in release.settings.compared_shares:
        return None
    reader = CostReader(release, read_prices(args.prices), since=releases.share_since(release))
    folder = args.capture or FeedbackFile.privacy_of(args.feedback)
    if folder is None:
        facts = "the tokens of answers are in the folder of etude serve --capture"
        raise InputError(f"{args.feedback} belongs to no captured answers", facts, hint="serve with --capture DIR, too")
    with opened_feedback(args.feedback, folder) as file, PrivacyFolder(folder) as privacy:
        return reader.read(privacy, file)


def _print_gate(release: Release, folders: Sequence[Path], *, by_loop: bool) -> None:
    """Print which checks of the gate cannot be made, or that all can."""
    found = missing_checks(release, folders)
    decides = "etude learn --releases decides it" if by_loop else "decide it: etude release gate"
    if not found:
        print(f"now: the gate is not decided; every result is there; {decides}")
        return
    print("now: the gate cannot be decided:")
    for one in found:
        print(f"  {one.check}: {one.why}\n    hint: {one.hint}")
    if by_loop:
        print("  etude learn --releases evaluates what is missing while it runs; if it has ended, start it again")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
