"""The state machine of releases: which changes there are, what they move, and what they refuse."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import msgspec
import pytest
from tests.unit.releases.played import begun, branches, outcomes, passed, published, settings

from etude.errors import EtudeError, InputError, StoreError
from etude.releases import Action, Arm, Outcome, ReleaseRefused, Releases, State, arm_of
from etude.releases.costs import cost_per_kept
from etude.releases.database import SecondRelease
from etude.releases.settings import Metric
from etude.stores import MemoryStore
from etude.weights import Follower
from etude.weights.chain.branches import point


class Away(MemoryStore):
    """A store that can be away: every call fails, or every write after the first `writes` of them."""

    away, writes = False, 1 << 30

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._check()
        return super().get(key, start, stop)

    def compare_and_swap(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._check()
        self.writes -= 1
        if self.writes < 0:
            raise StoreError("the store is away", hint="wait")
        return super().compare_and_swap(key, expected, data)

    def _check(self) -> None:
        if self.away:
            raise StoreError("the store is away", hint="wait")


def better(i: int, arm: Arm) -> float:
    return (0.9 if arm is Arm.CANARY else 0.1) + (i % 3) * 0.02


def test_a_better_candidate_goes_from_its_gate_over_growing_shares_to_all_users(tmp_path: Path) -> None:
    store = MemoryStore()
    versions, releases = published(store), Releases(tmp_path / "releases.sqlite")
    release = releases.begin(store, versions[1], settings(), channel="policy", location="memory", now=0.0)
    assert branches(store) == (versions[0], None)
    assert releases.gate(passed(release), now=1.0).state is State.GATED
    release, _ = releases.advance(store, now=2.0)
    assert (release.state, release.share, branches(store)) == (State.CANARY, 10, (versions[0], versions[1]))
    follower = Follower(store, branch="canary")
    follower.advance()
    assert follower.version == versions[1]
    now = 2.0
    for share in (10, 50):
        assert release.share == share
        releases.observe(outcomes(release, range(600), better), now=now + 20.0)
        release, found = releases.advance(store, now=(now := now + 30.0))
        assert found is not None
        assert found.action is Action.GROW
    assert release.share == 100
    releases.observe(outcomes(release, range(600), better), now=now)
    release, _ = releases.advance(store, now=now + 30.0)
    assert (release.state, release.share, branches(store)) == (State.PROMOTED, 0, (versions[1], versions[1]))
    told = releases.why(release.number)
    assert [(one.state, one.share) for one in told] == [
        (State.CANDIDATE, 0),
        (State.GATED, 0),
        (State.CANARY, 10),
        (State.CANARY, 50),
        (State.CANARY, 100),
        (State.PROMOTED, 100),
    ]
    assert told[4].reason.startswith("kept is better: +0.")
    assert told[4].evidence["evidence"][0]["low"] > 0.0
    assert all(one.reason for one in told)


def test_a_worse_candidate_is_rolled_back_and_its_followers_go_back(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store)
    follower, stable = Follower(store, branch="canary"), branches(store)[0]
    follower.advance()
    releases.observe(outcomes(releases.newest(), range(600), lambda i, arm: 1.0 - better(i, arm)), now=1.0)
    release, found = releases.advance(store, now=2.0)
    assert found is not None
    assert found.action is Action.ROLL_BACK
    assert (release.state, branches(store)) == (State.ROLLED_BACK, (stable, stable))
    assert {releases.assign(f"user-{i}") for i in range(100)} == {Arm.STABLE}
    follower.advance()
    assert follower.version == stable
    assert releases.why(1)[-1].reason.startswith("kept is worse: -0.")


def test_a_candidate_without_a_gate_serves_nobody_by_no_command(tmp_path: Path) -> None:
    store = MemoryStore()
    versions, releases = published(store), Releases(tmp_path / "releases.sqlite")
    releases.begin(store, versions[1], settings(), location="memory", now=0.0)
    for change in (
        lambda: releases.advance(store, now=1.0),
        lambda: releases.promote(store, reason="hurry", now=1.0),
        lambda: releases.hold(reason="hurry", now=1.0),
        lambda: releases.resume(reason="hurry", now=1.0),
    ):
        with pytest.raises(ReleaseRefused, match=r"gate|cannot"):
            change()
    assert branches(store) == (versions[0], None)
    assert releases.assign("user") is Arm.STABLE


def test_a_candidate_that_fails_its_gate_is_refused_for_good_with_the_reason(tmp_path: Path) -> None:
    store = MemoryStore()
    versions, releases = published(store, versions=3), Releases(tmp_path / "releases.sqlite")
    release = releases.begin(store, versions[1], settings(), location="memory", now=0.0)
    other = msgspec.structs.replace(passed(release), candidate=str(versions[2]))
    with pytest.raises(ReleaseRefused, match="does not belong"):
        releases.gate(other, now=1.0)
    assert releases.gate(passed(release, "repair: worse"), now=1.0).state is State.REFUSED
    for change in (releases.promote, releases.rollback):
        with pytest.raises(ReleaseRefused, match="refused"):
            change(store, reason="hurry", now=2.0)
    assert releases.advance(store, now=2.0)[0].state is State.REFUSED
    assert releases.why(1)[-1].reason == "repair: worse"
    assert releases.begin(store, versions[2], settings(), location="memory", now=3.0).number == 2


def test_a_second_release_is_told_what_can_be_done_with_the_open_one(tmp_path: Path) -> None:
    store = MemoryStore()
    candidate = published(store)[1]
    releases = Releases(tmp_path / "releases.sqlite")

    def hint() -> str:
        with pytest.raises(ReleaseRefused, match="release 1 is open") as refused:
            releases.begin(store, candidate, settings(), location="memory", now=1.0)
        return refused.value.hint

    release = releases.begin(store, candidate, settings(), location="memory", now=0.0)
    assert "etude release gate" in hint()
    assert "promote" not in hint()
    releases.gate(passed(release), now=1.0)
    assert "etude release advance" in hint()
    assert "promote" not in hint()
    releases.advance(store, now=2.0)
    assert "etude release promote | rollback" in hint()
    releases.close()


def test_two_releases_at_once_are_refused_in_one_file_and_in_two(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store)
    with pytest.raises(ReleaseRefused, match="release 1 is open"):
        releases.begin(store, releases.newest().candidate, settings(), location="memory", now=1.0)
    again = Releases(tmp_path / "releases.sqlite")  # as another process has it
    with pytest.raises(ReleaseRefused, match="release 1 is open"):
        again.begin(store, releases.newest().candidate, settings(), location="memory", now=1.0)
    with pytest.raises(SecondRelease):  # begun between another process's look and its write
        again._database.begin("candidate", b"{}", b"{}")
    third = published(store, versions=3)[2]
    with pytest.raises(ReleaseRefused, match="in use"):
        Releases(tmp_path / "other.sqlite").begin(store, third, settings(), location="memory", now=1.0)


def test_a_canary_without_traffic_holds_with_its_reason_after_the_stated_time(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store)
    assert releases.advance(store, now=999.0)[0].state is State.CANARY
    only_stable = [
        Outcome(id=f"{i}", subject=f"user-{i}", metric="kept", value=0.5)
        for i in range(100)
        if arm_of(releases.newest().salt, f"user-{i}", 10) is Arm.STABLE
    ]
    releases.observe(only_stable, now=900.0)
    release, _ = releases.advance(store, now=1001.0)
    assert (release.state, release.share) == (State.HELD, 10)
    assert releases.why(1)[-1].reason == "no outcome of the canary version for 1001 s"
    assert releases.advance(store, now=9999.0)[0].state is State.HELD
    resumed = releases.resume(reason="traffic is back", now=9999.0)
    assert (resumed.state, resumed.share, resumed.since) == (State.CANARY, 10, 9999.0)
    assert releases.advance(store, now=10000.0)[0].state is State.CANARY


def test_a_canary_that_is_neither_better_nor_worse_holds(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store, shares=(50,), max_s=100.0)
    releases.observe(outcomes(releases.newest(), range(400), lambda i, _: i % 2), now=50.0)
    release, found = releases.advance(store, now=100.0)
    assert release.state is State.HELD
    assert found is not None
    assert "kept is not shown to be better" in found.reason


def test_a_guard_keeps_a_better_canary_from_promotion_and_rolls_back_a_harmful_one(tmp_path: Path) -> None:
    guards = {"metrics": (Metric("kept"), Metric("angry", higher_is_better=False)), "shares": (50,)}
    for number, (harm, action) in enumerate([(0.0, Action.PROMOTE), (0.04, Action.WAIT), (0.9, Action.ROLL_BACK)]):
        store = MemoryStore()
        releases = begun(tmp_path / f"{number}.sqlite", store, **guards)
        release = releases.newest()
        angry = outcomes(
            release,
            range(1000),
            lambda i, arm, harm=harm: harm if arm is Arm.CANARY else 0.0,
            metric="angry",
        )
        releases.observe([*outcomes(release, range(1000), better), *angry], now=1.0)
        assert releases.look(release, now=2.0).action is action, harm


def test_a_better_canary_whose_kept_changes_cost_too_much_is_not_promoted(tmp_path: Path) -> None:
    metric = Metric("kept", cost_rise=0.1)
    for dollars, told in ((1.2, "dollars per kept +20.0%, must be at most +10.0%"), (1.09, ""), (None, "are unknown")):
        releases = begun(tmp_path / f"{dollars}.sqlite", MemoryStore(), shares=(50,), metrics=(metric,), max_s=100.0)
        release, store = releases.newest(), MemoryStore()
        releases.observe(outcomes(release, range(600), better), now=1.0)
        costs = {Arm.STABLE: cost_per_kept([(10.0, 10.0)], answers=20)}
        costs[Arm.CANARY] = cost_per_kept([(None if dollars is None else 10 * dollars, 10.0)], answers=20)
        found = releases.look(release, now=50.0, costs=costs)
        assert found.action is (Action.WAIT if told else Action.PROMOTE), found.reason
        if told:
            assert told in found.reason
            release, _ = releases.advance(store, now=102.0, costs=costs)
            assert (release.state, releases.why(1)[-1].evidence["costs"]["stable"]["value"]) == (State.HELD, 1.0)
    assert "unknown" in releases.look(release, now=50.0).reason  # nobody computed them


def test_costs_are_compared_only_per_unit_of_a_first_metric_of_which_more_is_better() -> None:
    with pytest.raises(ValueError, match="cost_rise of a metric after the first"):
        settings(metrics=(Metric("kept"), Metric("rated", cost_rise=0.1)))
    with pytest.raises(ValueError, match="only a metric of which more is better"):
        Metric("dissatisfied", higher_is_better=False, cost_rise=0.1)


def test_a_release_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    """Its stored settings lack the fields that were added since."""
    path, store = tmp_path / "releases.sqlite", MemoryStore()
    begun(path, store).close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        [facts] = database.execute("SELECT facts FROM releases").fetchone()
        assert b',"cost_rise":null' in facts
        database.execute("UPDATE releases SET facts = ?", (facts.replace(b',"cost_rise":null', b""),))
    releases = Releases(path)
    assert releases.hold(reason="the weekend", now=1.0).state is State.HELD


def test_a_loud_user_counts_like_a_silent_one(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store, cap=3, window_s=10.0, shares=(50,))
    release = releases.newest()
    loud = next(i for i in range(100) if arm_of(release.salt, f"user-{i}", 50) is Arm.CANARY)
    users = [i for i in range(200) if i != loud]
    releases.observe(outcomes(release, users, lambda i, _: float(i % 2)), now=1.0)
    quiet = releases.look(release, now=20.0).evidence[0]
    many = [Outcome(id=f"loud-{i}", subject=f"user-{loud}", metric="kept", value=1.0) for i in range(5000)]
    assert releases.observe(many, now=1.0) == 3
    found = releases.look(release, now=20.0).evidence[0]
    assert found.canary == quiet.canary + 1
    assert abs(found.value - quiet.value) < 1.0 / found.canary


def test_an_outcome_counts_once_at_its_share_and_only_of_the_version_that_serves_the_user(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store)
    release = releases.newest()
    user = next(f"user-{i}" for i in range(1000) if arm_of(release.salt, f"user-{i}", 10) is Arm.CANARY)
    first = Outcome(id="1", subject=user, metric="kept", value=1.0)
    assert releases.observe([first, first], now=1.0) == 1
    assert releases.observe([first], now=2.0) == 0
    assert releases.observe([Outcome(id="2", subject=user, metric="kept", value=1.0, share=5)], now=2.0) == 0
    assert releases.observe([Outcome(id="3", subject=user, metric="kept", value=1.0, arm=Arm.STABLE)], now=2.0) == 0
    assert releases.observe([Outcome(id="4", subject=user, metric="kept", value=1.0, arm=Arm.CANARY)], now=2.0) == 1
    with pytest.raises(InputError, match="no metric 'kep'"):
        releases.observe([Outcome(id="5", subject=user, metric="kep", value=1.0)], now=2.0)
    with pytest.raises(InputError, match="outside"):
        releases.observe([Outcome(id="5", subject=user, metric="kept", value=1.5)], now=2.0)


def test_a_user_counts_when_its_window_has_passed_and_later_outcomes_change_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store, window_s=100.0, shares=(50,))
    release = releases.newest()
    user = next(f"user-{i}" for i in range(100) if arm_of(release.salt, f"user-{i}", 50) is Arm.CANARY)

    def observed(name: str, value: float, now: float) -> None:
        releases.observe([Outcome(id=name, subject=user, metric="kept", value=value)], now=now)

    observed("1", 1.0, 10.0)
    assert releases.look(release, now=109.0).evidence[0].canary == 0
    observed("2", 0.0, 100.0)
    assert releases.look(release, now=110.0).evidence[0].canary == 1
    observed("3", 0.0, 111.0)
    [(metric, arm, value)] = releases._database.values(1, 50, 200.0, 100.0)
    assert (metric, arm, value) == ("kept", "canary", 0.5)


def test_a_store_that_is_away_in_a_promotion_loses_nothing_and_the_next_try_completes_it(tmp_path: Path) -> None:
    store = Away()
    releases = begun(tmp_path / "releases.sqlite", store)
    before, candidate = branches(store)
    store.away = True
    with pytest.raises(StoreError):
        releases.promote(store, reason="good", now=5.0)
    pending = Releases(tmp_path / "releases.sqlite").newest()
    assert pending.pending is not None
    assert (pending.state, pending.pending.state, pending.share) == (State.CANARY, State.PROMOTED, 10)
    with pytest.raises(ReleaseRefused, match="cannot be held"):
        releases.hold(reason="wait", now=6.0)
    store.away = False
    assert branches(store) == (before, candidate)
    release, _ = releases.advance(store, now=99.0)
    assert (release.state, release.since, branches(store)) == (State.PROMOTED, 5.0, (candidate, candidate))
    assert [one.state for one in releases.why(1)].count(State.PROMOTED) == 1


def test_a_rollback_sends_users_to_the_stable_version_before_the_store_answers(tmp_path: Path) -> None:
    store = Away()
    releases = begun(tmp_path / "releases.sqlite", store, shares=(99,))
    assert Arm.CANARY in {releases.assign(f"user-{i}") for i in range(50)}
    stable, store.away = branches(store)[0], True
    with pytest.raises(StoreError):
        releases.rollback(store, reason="bad", now=5.0)
    assert {releases.assign(f"user-{i}") for i in range(50)} == {Arm.STABLE}
    store.away = False
    assert releases.rollback(store, reason="again", now=6.0).state is State.ROLLED_BACK
    assert branches(store) == (stable, stable)
    assert releases.why(1)[-1].reason == "bad"


def test_a_promotion_that_the_store_broke_off_can_be_rolled_back_instead(tmp_path: Path) -> None:
    store = Away()
    releases = begun(tmp_path / "releases.sqlite", store)
    stable, store.writes = branches(store)[0], 0
    with pytest.raises(StoreError):
        releases.promote(store, reason="good", now=5.0)
    store.writes = 1 << 30
    assert releases.rollback(store, reason="no", now=6.0).state is State.ROLLED_BACK
    assert branches(store) == (stable, stable)


def test_the_newest_promoted_release_can_be_rolled_back(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store)
    stable = branches(store)[0]
    assert releases.promote(store, reason="good", now=5.0).state is State.PROMOTED
    assert releases.rollback(store, reason="bad", now=6.0).state is State.ROLLED_BACK
    assert branches(store) == (stable, stable)
    with pytest.raises(ReleaseRefused, match="rolled back"):
        releases.rollback(store, reason="bad", now=7.0)


def test_a_branch_that_was_moved_by_hand_is_not_overwritten_by_a_promotion(tmp_path: Path) -> None:
    store = MemoryStore()
    versions = published(store, versions=3)
    releases = Releases(tmp_path / "releases.sqlite")
    release = releases.begin(store, versions[1], settings(), location="memory", now=0.0)
    releases.gate(passed(release), now=0.0)
    releases.advance(store, now=0.0)
    point(store, "policy", versions[2], branch="stable")
    with pytest.raises(ReleaseRefused, match="moved by hand"):
        releases.promote(store, reason="good", now=1.0)
    assert releases.rollback(store, reason="moved", now=2.0).state is State.ROLLED_BACK
    assert branches(store) == (versions[2], versions[2])


def test_what_cannot_begin_is_told(tmp_path: Path) -> None:
    store, releases = MemoryStore(), Releases(tmp_path / "releases.sqlite")
    with pytest.raises(InputError, match="there is no release"):
        releases.newest()
    versions = published(store)
    with pytest.raises(InputError, match="stable version already"):
        releases.begin(store, versions[0], settings(), location="memory", now=0.0)
    with pytest.raises(InputError, match="no branch 'stable'"):
        releases.begin(MemoryStore(), versions[1], settings(), location="memory", now=0.0)


def test_another_process_that_changed_the_release_first_wins(tmp_path: Path) -> None:
    store = MemoryStore()
    one = begun(tmp_path / "releases.sqlite", store)
    seen = one.newest()
    other = Releases(tmp_path / "releases.sqlite")
    other.hold(reason="mine", now=1.0)
    with pytest.raises(ReleaseRefused, match="another process"):
        one._step(seen, State.HELD, 10, now=1.0, by="operator", reason="late")
    assert [told.reason for told in one.why(1)][-1] == "mine"


def test_a_file_that_is_no_database_is_told_in_three_parts(tmp_path: Path) -> None:
    path = tmp_path / "releases.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(EtudeError, match="cannot be read or written"):
        Releases(path)
