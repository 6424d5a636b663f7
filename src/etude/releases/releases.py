"""The state machine of releases: candidate → gated → canary at rising shares → promoted, held or rolled back.

A change that moves pointers of the weight channel is two steps: it is stored as `pending` with its reason, the pointers
move, and the transition is stored. A process that is killed in between, or a store that is away, leaves a release whose
next change completes what is pending. A rollback sends all subjects to the stable version from its first step on.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import InputError
from etude.records.completion import Version
from etude.releases.assignment import MAX_AGE_S, SALT_BYTES, Arm, arm_of, pseudonym
from etude.releases.costs import Costs
from etude.releases.database import ReleaseDatabase, SecondRelease
from etude.releases.decision import Action, Decision, Traffic, decide
from etude.releases.gate import GateResult
from etude.releases.outcomes import Outcome
from etude.releases.pointers import move, stable_version
from etude.releases.settings import ReleaseSettings
from etude.releases.states import Release, ReleaseRefused, State, Transition
from etude.seams import BlobStore
from etude.weights.chain.signing import Signer

RULES, OPERATOR, LOOP = "rules", "operator", "loop"  # who decides
_FIRST = "passed its gate"


class Releases:
    """The releases that a file records, and the operations on them. Use an object in one thread only.

    The file is created if it does not exist.

    With `readonly` the file must exist, and only the methods that read may be called. `signer` signs the pointers that
    are moved; None leaves them unsigned. Every `now` is in seconds since 1970. All methods raise `StoreError` if the
    file cannot be used. Methods with the argument `store` also raise it if that store does not answer; the same call,
    made again, then completes the change."""

    def __init__(self, path: Path, *, signer: Signer | None = None, readonly: bool = False) -> None:
        self._database, self._signer = ReleaseDatabase(path, readonly=readonly), signer

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # reading

    def all(self) -> list[Release]:
        """Return all releases, the oldest first."""
        return [
            msgspec.structs.replace(msgspec.json.decode(facts, type=Release), number=number)
            for number, facts in self._database.releases()
        ]

    def newest(self) -> Release:
        """Return the release that was begun last. Raises `InputError` if there is none."""
        found = self.all()
        if not found:
            raise InputError("there is no release", hint="begin one: etude release begin STORE VERSION --settings FILE")
        return found[-1]

    def why(self, number: int) -> list[Transition]:
        """Return the transitions of release number `number` with their reasons and evidence, the oldest first."""
        return [msgspec.json.decode(one, type=Transition) for one in self._database.transitions(number)]

    def assign(self, subject: str) -> Arm:
        """Return the version that a subject gets now. Raises `InputError` for a subject that is empty or too long."""
        release = self.newest()
        return arm_of(release.salt, subject, release.share)

    # changes

    def begin(
        self,
        store: BlobStore,
        candidate: Version,
        settings: ReleaseSettings,
        *,
        channel: str = "policy",
        location: str,
        now: float,
        by: str = OPERATOR,
    ) -> Release:
        """Begin a release of the version `candidate`. It serves no requests before it has passed its gate.

        `location`: the name of the store, which is recorded. `now`: seconds since 1970. `by`: who begins it. Raises
        `ReleaseRefused` if another release is open, and `InputError` if there is no stable version."""
        others = self.all()
        if others and others[-1].pending is not None:  # such as the rollback of a promoted release
            raise _wrong_state(others[-1], "be followed by another")
        if others and others[-1].is_open:
            raise _is_open(others[-1])
        stable = stable_version(store, channel, location, candidate)
        release = Release(
            number=0,
            location=location,
            channel=channel,
            candidate=candidate,
            stable=stable,
            settings=settings,
            salt=secrets.token_bytes(SALT_BYTES),
            state=State.CANDIDATE,
            share=0,
            since=now,
        )
        reason = f"{candidate} against {stable}"
        first = Transition(at=now, origin=None, state=State.CANDIDATE, share=0, by=by, reason=reason)
        try:
            number = self._database.begin(release.state, _encoded(release), _encoded(first))
        except SecondRelease:  # another process began one since
            raise _is_open(self.newest()) from None
        return msgspec.structs.replace(release, number=number)

    def gate(self, result: GateResult, *, now: float) -> Release:
        """Store the result of the gate: the newest release becomes GATED or REFUSED.

        Raises `ReleaseRefused` if the release is not in the state CANDIDATE, or if the result compares other versions.
        """
        release = self._newest(State.CANDIDATE, to="be gated")
        if (result.candidate, result.stable) != (str(release.candidate), str(release.stable)):
            raise ReleaseRefused(
                f"the gate's result does not belong to release {release.number}",
                f"it compares {result.candidate} with {result.stable}",
                hint=f"compare {release.candidate} with {release.stable}",
            )
        state = State.REFUSED if result.failures else State.GATED
        reason = "; ".join(result.failures) or _FIRST
        return self._step(release, state, 0, now=now, by=RULES, reason=reason, evidence=msgspec.to_builtins(result))

    def advance(self, store: BlobStore, *, now: float, costs: Costs | None = None) -> tuple[Release, Decision | None]:
        """Take the next step of the newest release, and return the release with the decision that led to it.

        A transition that was begun and not completed is completed. Otherwise the rules decide: begin the canary, raise
        its share, promote it, hold it, or roll it back. The decision is None if nothing was to be decided. `costs`: the
        dollars per kept change of both versions at this share, as for `look`.

        Call it as often as wanted. Raises `ReleaseRefused` for a candidate that has not passed its gate."""
        release = self.newest()
        if release.pending is not None:
            return self._finish(store, release), None
        if release.state is State.CANDIDATE:
            raise _no_gate(release)
        if release.state is State.GATED:
            first = release.settings.shares[0]
            return self._move(store, release, State.CANARY, first, now=now, by=RULES, reason=_FIRST), None
        if release.state is not State.CANARY:
            return release, None
        found = self.look(release, now=now, costs=costs)
        facts: dict[str, Any] = {
            "reason": found.reason,
            "evidence": msgspec.to_builtins(found),
            "by": RULES,
            "now": now,
        }
        match found.action:
            case Action.GROW:
                shares = release.settings.shares
                release = self._step(release, State.CANARY, shares[shares.index(release.share) + 1], **facts)
            case Action.HOLD:
                release = self._step(release, State.HELD, release.share, **facts)
            case Action.PROMOTE:
                release = self._move(store, release, State.PROMOTED, 100, **facts)
            case Action.ROLL_BACK:
                release = self._move(store, release, State.ROLLED_BACK, 0, **facts)
            case Action.WAIT:
                pass
        return release, found

    def look(self, release: Release, *, now: float, costs: Costs | None = None) -> Decision:
        """Return the decision of the rules about a canary at this time, without carrying it out.

        `costs`: the dollars per kept change of both versions (`feedback.CostReader`). None: unknown; with a `cost_rise`
        the canary is not promoted then."""
        settings, values = release.settings, dict[str, dict[Arm, list[float]]]()
        rows = self._database.values(release.number, release.share, now - settings.window_s, settings.window_s)
        for metric, arm, value in rows:
            values.setdefault(metric, {}).setdefault(Arm(arm), []).append(min(1.0, max(0.0, value)))
        last = {Arm(arm): at for arm, at in self._database.last(release.number, release.share)}
        return decide(settings, release.share, Traffic(release.since, now, last), values, costs)

    def observe(self, outcomes: Iterable[Outcome], *, now: float) -> int:
        """Store outcomes of the newest release, and return how many are new and count at the present share.

        These are not stored: outcomes whose id is stored already, outcomes from an earlier share, outcomes of a subject
        that has `cap` outcomes already, outcomes that name a version (`arm`) that no longer serves the subject, and
        outcomes of answers by a version that is neither the stable nor the candidate one. Raises `InputError` for an
        unknown metric."""
        release = self.newest()
        if release.state not in (State.CANARY, State.HELD):
            return 0
        known = {metric.name for metric in release.settings.metrics}
        rows, share_since = [], self.share_since(release)
        by_version = {str(release.stable): Arm.STABLE, str(release.candidate): Arm.CANARY}
        for one in outcomes:
            one.check(known)
            if one.version is None:
                arm: Arm | None = arm_of(release.salt, one.subject, release.share)
            else:
                arm = by_version.get(one.version)
            is_new = one.answered is None or one.answered >= share_since + MAX_AGE_S
            if arm is not None and is_new and one.share in (None, release.share) and one.arm in (None, arm):
                subject = pseudonym(release.salt, one.subject)
                rows.append((one.id, one.metric, release.share, arm.value, subject, now, one.value))
        return self._database.add_outcomes(release.number, rows, release.settings.cap)

    def unlink(self, subjects: Iterable[str]) -> int:
        """Make the outcomes of erased subjects unlinkable: they still count, and nothing leads from a subject to them.

        `subjects`: as in `Outcome`. Returns the number of outcomes."""
        names, releases = [*subjects], self.all()
        return self._database.unlink((one.number, pseudonym(one.salt, name)) for one in releases for name in names)

    def share_since(self, release: Release) -> float:
        """Return when the present share of a canary began."""
        since = release.since
        for one in reversed(self.why(release.number)):
            if one.share != release.share:
                break
            since = one.at
        return since

    def promote(self, store: BlobStore, *, reason: str, now: float, by: str = OPERATOR) -> Release:
        """Make the candidate of the newest release the stable version, by the decision of `by`.

        If an earlier call was interrupted, it is completed. Raises `ReleaseRefused` if the release serves no requests
        or has ended."""
        release = self.newest()
        if release.pending is not None and release.pending.state is State.PROMOTED:
            return self._finish(store, release)
        if release.state is State.CANDIDATE:
            raise _no_gate(release)
        self._require(release, State.CANARY, State.HELD, to="be promoted")
        return self._move(store, release, State.PROMOTED, 100, now=now, by=by, reason=reason)

    def hold(self, *, reason: str, now: float) -> Release:
        """Keep the canary of the newest release at its share until an operator decides. Raises `ReleaseRefused` if the
        release has no canary."""
        release = self._newest(State.CANARY, to="be held")
        return self._step(release, State.HELD, release.share, now=now, by=OPERATOR, reason=reason)

    def resume(self, *, reason: str, now: float, by: str = OPERATOR) -> Release:
        """Continue a release that was held, with the same share and its earlier outcomes.

        Raises `ReleaseRefused` if it was not held."""
        release = self._newest(State.HELD, to="be resumed")
        return self._step(release, State.CANARY, release.share, now=now, by=by, reason=reason)

    def rollback(self, store: BlobStore, *, reason: str, now: float, by: str = OPERATOR) -> Release:
        """End the newest release, in any state: all subjects get the version from before it.

        If an earlier call was interrupted, it is completed. A promoted release can be rolled back as long as it is the
        newest. The decision is stored first and takes effect then; the pointers of the channel move afterwards. Raises
        `ReleaseRefused` if the release was refused or rolled back already."""
        release = self.newest()
        if release.pending is not None and release.pending.state is State.ROLLED_BACK:
            return self._finish(store, release)
        if release.state in (State.REFUSED, State.ROLLED_BACK):
            raise _wrong_state(release, "be rolled back")
        return self._move(store, release, State.ROLLED_BACK, 0, now=now, by=by, reason=reason)

    # steps

    def _newest(self, *states: State, to: str) -> Release:
        release = self.newest()
        self._require(release, *states, to=to)
        return release

    @staticmethod
    def _require(release: Release, *states: State, to: str) -> None:
        if release.state not in states or release.pending is not None:
            raise _wrong_state(release, to)

    def _step(
        self, release: Release, state: State, share: int, *, now: float, by: str, reason: str, evidence: Any = None
    ) -> Release:
        """Store a transition that moves no pointer."""
        done = Transition(
            at=now, origin=release.state, state=state, share=share, by=by, reason=reason, evidence=evidence
        )
        return self._store(release, _after(release, done), done)

    def _move(
        self,
        store: BlobStore,
        release: Release,
        state: State,
        share: int,
        *,
        now: float,
        by: str,
        reason: str,
        evidence: Any = None,
    ) -> Release:
        """Store a transition as pending, and complete it."""
        pending = Transition(
            at=now, origin=release.state, state=state, share=share, by=by, reason=reason, evidence=evidence
        )
        now_served = 0 if state is State.ROLLED_BACK else release.share
        release = self._store(release, msgspec.structs.replace(release, pending=pending, share=now_served), None)
        return self._finish(store, release)

    def _finish(self, store: BlobStore, release: Release) -> Release:
        """Move the pointers of what is pending, and store it as done."""
        pending = release.pending
        assert pending is not None
        move(store, release, pending.state, signer=self._signer)
        return self._store(release, _after(release, pending), pending)

    def _store(self, before: Release, after: Release, transition: Transition | None) -> Release:
        done = _encoded(transition) if transition is not None else None
        stored = dict(self._database.releases())[after.number]  # with the settings of the version that wrote them
        is_same = _encoded(msgspec.json.decode(stored, type=Release)) == _encoded(before)
        if not is_same or not self._database.change(after.number, stored, after.state, _encoded(after), done):
            raise ReleaseRefused(
                f"release {after.number} was changed by another process",
                f"it is {_described(self.newest())} now",
                hint="see its transitions (etude release why), then repeat the command if it still applies",
            )
        return after


def _after(release: Release, done: Transition) -> Release:
    share = done.share if done.state in (State.CANARY, State.HELD) else 0
    return msgspec.structs.replace(release, state=done.state, share=share, since=done.at, pending=None)


def _encoded(one: Release | Transition) -> bytes:
    plain = msgspec.structs.replace(one, number=0) if isinstance(one, Release) else one
    return msgspec.json.encode(plain, order="deterministic")


def _described(release: Release) -> str:
    share = f" at {release.share} %" if release.share else ""
    pending = f", about to be {release.pending.state}" if release.pending is not None else ""
    return f"{release.state}{share}{pending}"


def _is_open(release: Release) -> ReleaseRefused:
    if release.pending is not None:
        hint = "complete it first: etude release advance"
    elif release.state is State.CANDIDATE:
        hint = "decide its gate (etude release gate), or end it: etude release rollback"
    elif release.state is State.GATED:
        hint = "begin its canary (etude release advance), or end it: etude release rollback"
    else:
        hint = "promote it, or roll it back: etude release promote | rollback"
    what = f"release {release.number} is open"
    return ReleaseRefused(what, f"{release.candidate} is {_described(release)}", hint=hint)


def _no_gate(release: Release) -> ReleaseRefused:
    return ReleaseRefused(
        f"release {release.number} has not passed its gate",
        f"{release.candidate} is in the state candidate",
        hint="evaluate both versions (etude eval), then: etude release gate",
    )


def _wrong_state(release: Release, to: str) -> ReleaseRefused:
    if release.pending is not None:
        hint = "complete it first: etude release advance"
    elif release.state is State.GATED:
        hint = "begin its canary first: etude release advance"
    else:
        hint = "see etude release why"
    return ReleaseRefused(f"release {release.number} cannot {to}", f"it is {_described(release)}", hint=hint)
