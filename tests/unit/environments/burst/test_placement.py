from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.environments.burst import Capacity, Lease, Need, Placement
from etude.environments.burst.placement import Batch
from etude.errors import MachineError

GIB = 1 << 30
TEN = Capacity(cores=1.0, memory_bytes=GIB)  # room for ten machines


def fleet(num_hosts: int, capacity: Capacity = TEN, **options: object) -> Placement:
    placement = Placement(seed=3, **options)  # type: ignore[arg-type]
    for i in range(num_hosts):
        placement.join(f"h{i}", capacity, 0.0)
    return placement


def beat(placement: Placement, now_s: float, *, but: tuple[str, ...] = ()) -> None:
    for host in list(placement.hosts):
        if host.name not in but:
            placement.heartbeat(host.name, now_s)


def test_siblings_are_forked_beside_their_snapshot():
    placement = fleet(8)
    placement.add_snapshot("tree", "h3", 0.0)
    [batch] = placement.place("tree", 8, 0.0)
    assert (batch.host, batch.n, batch.sources, batch.attempt) == ("h3", 8, (), 1)


def test_a_group_that_does_not_fit_there_goes_whole_to_a_host_that_copies_the_snapshot():
    placement = fleet(8)
    placement.add_snapshot("tree", "h3", 0.0)
    placement.place("tree", 8, 0.0)
    [batch] = placement.place("tree", 8, 0.0)
    assert batch.host != "h3"
    assert (batch.n, batch.sources) == (8, ("h3",))
    assert set(placement.hosts_with("tree")) == {"h3", batch.host}


def test_a_snapshot_in_demand_is_copied_although_its_host_has_room():
    placement = fleet(16, Capacity(cores=96, memory_bytes=768 * GIB))
    placement.add_snapshot("tree", "h0", 0.0)
    hosts = Counter(batch.host for _ in range(100) for batch in placement.place("tree", 4, 0.0))
    assert len(hosts) > 8
    assert max(hosts.values()) < 40


def test_a_snapshot_that_is_rarely_asked_for_stays_where_it_is():
    placement = fleet(16, Capacity(cores=96, memory_bytes=768 * GIB))
    placement.add_snapshot("tree", "h0", 0.0)
    for i in range(50):
        [batch] = placement.place("tree", 4, float(i))
        assert placement.started(batch.id, i + 0.01)
        placement.ended(batch.id, 4)
        beat(placement, float(i))
    assert placement.hosts_with("tree") == ("h0",)


def test_all_machines_of_a_request_are_placed_or_none():
    placement = fleet(2)
    placement.add_snapshot("tree", "h0", 0.0)
    assert placement.place("tree", 21, 0.0) == []
    assert sum(batch.n for batch in placement.place("tree", 20, 0.0)) == 20
    assert placement.place("tree", 1, 0.0) == []


def test_memory_and_what_a_host_says_bound_it_too():
    placement = fleet(1, Capacity(cores=100.0, memory_bytes=GIB))
    placement.add_snapshot("tree", "h0", 0.0, need=Need(cores=0.1, memory_bytes=GIB // 4))
    assert placement.place("tree", 5, 0.0) == []
    [batch] = placement.place("tree", 3, 0.0)
    placement.heartbeat("h0", 0.0, pressure=1.0)
    assert placement.place("tree", 1, 0.0) == []
    placement.heartbeat("h0", 0.0, pressure=0.5)
    assert len(placement.place("tree", 1, 0.0)) == 1
    assert placement.started(batch.id, 0.1)


def test_a_snapshot_that_no_host_has_is_refused_and_a_new_one_begins_on_other_racks():
    placement = Placement()
    for i in range(6):
        placement.join(f"h{i}", Capacity(cores=1.0, memory_bytes=GIB, rack=f"r{i // 3}"), 0.0)
    with pytest.raises(MachineError, match="no host has snapshot"):
        placement.place("tree", 1, 0.0)
    assert {name in ("h0", "h1", "h2") for name in placement.choose_homes(2)} == {True, False}


def test_the_state_of_a_machine_in_use_is_forked_on_its_host_only():
    placement = fleet(4)
    placement.add_snapshot("state", "h2", 0.0, copyable=False)
    [batch] = placement.place("state", 10, 0.0)
    assert batch.host == "h2"
    assert placement.place("state", 1, 0.0) == []


def test_what_is_overdue_is_tried_elsewhere_and_the_first_that_starts_is_the_one():
    placement = fleet(4)
    for name in ("h0", "h1"):
        placement.add_snapshot("tree", name, 0.0)
    [first] = placement.place("tree", 4, 0.0)
    beat(placement, 2.0)
    [second] = placement.review(2.0).batches
    assert (second.group, second.attempt) == (first.group, 2)
    assert second.host != first.host
    assert placement.started(second.id, 2.1)
    assert placement.rivals(second.id) == [first]
    assert not placement.started(first.id, 2.2)
    assert placement.started(second.id, 2.3)  # said twice
    placement.ended(first.id, 4)
    placement.ended(second.id, 4)
    assert all(host.cores == 0 for host in placement.hosts)


def test_a_host_that_cannot_fork_is_left_for_another():
    placement = fleet(3)
    placement.add_snapshot("tree", "h0", 0.0)
    [first] = placement.place("tree", 4, 0.0)
    second = placement.failed(first.id, 0.1)
    assert second is not None
    assert (second.host != first.host, second.attempt) == (True, 2)
    assert placement.failed(first.id, 0.2) is None  # said twice


def test_machines_of_a_silent_host_are_lost_after_its_lease_and_start_anew_elsewhere():
    placement = fleet(3, lease_s=10.0, margin_s=1.0)
    for name in ("h0", "h1"):
        placement.add_snapshot("tree", name, 0.0)
    [first] = placement.place("tree", 4, 0.0)
    assert placement.started(first.id, 0.1)
    placement.ended(first.id, 1)
    beat(placement, 10.9, but=(first.host,))
    assert placement.review(10.9).lost == ()
    beat(placement, 11.1, but=(first.host,))
    review = placement.review(11.1)
    assert review.hosts == (first.host,)
    [lost] = review.lost
    assert (lost.id, lost.n) == (first.id, 3)
    second = placement.retry(lost, 11.1)
    assert second is not None
    assert (second.attempt, second.n, second.host != first.host) == (2, 3, True)
    assert not placement.heartbeat(first.host, 12.0)  # it has to begin again
    placement.join(first.host, TEN, 12.0)


def test_a_batch_on_a_silent_host_starts_elsewhere_before_its_lease_ends():
    placement = fleet(3, lease_s=10.0, suspect_s=1.5, patience=100.0, grace_s=100.0)
    for name in ("h0", "h1"):
        placement.add_snapshot("tree", name, 0.0)
    [first] = placement.place("tree", 4, 0.0)
    beat(placement, 1.6, but=(first.host,))
    [second] = placement.review(1.6).batches
    assert second.host != first.host
    assert placement.place("tree", 4, 1.6)[0].host != first.host


def test_a_group_without_room_waits_and_is_placed_when_there_is_some():
    placement = fleet(2, lease_s=1.0, margin_s=0.1)
    for name in ("h0", "h1"):
        placement.add_snapshot("tree", name, 0.0)
    batches = placement.place("tree", 10, 0.0) + placement.place("tree", 10, 0.0)
    assert all(placement.started(batch.id, 0.1) for batch in batches)
    beat(placement, 2.0, but=("h0",))
    [lost] = placement.review(2.0).lost
    assert placement.retry(lost, 2.0) is None
    assert placement.waiting == 10
    placement.join("h0", TEN, 3.0)
    beat(placement, 3.0)
    [again] = placement.review(3.0).batches
    assert (again.host, placement.waiting) == ("h0", 0)


def test_a_snapshot_whose_last_host_is_lost_is_told_to_be_missing():
    placement = fleet(2, lease_s=1.0, margin_s=0.1)
    placement.add_snapshot("tree", "h0", 0.0)
    [batch] = placement.place("tree", 4, 0.0)
    assert placement.started(batch.id, 0.1)
    beat(placement, 2.0, but=("h0",))
    assert placement.retry(placement.review(2.0).lost[0], 2.0) is None
    assert placement.missing == {"tree"}
    placement.add_snapshot("tree", "h1", 2.1)
    [again] = placement.review(2.1).batches
    assert (again.host, again.attempt) == ("h1", 2)


def test_a_lease_that_was_kept_by_answers_is_over_before_the_control_plane_counts_it_lost():
    lease, heard_s = Lease(10.0, now_s=0.0), 0.0
    rng = random.Random(1)
    for sent in range(1, 100):
        received_s = sent + rng.random() * 3
        if rng.random() < 0.9:  # the heartbeat arrives
            heard_s = max(heard_s, received_s)
            if rng.random() < 0.9:  # and the answer to it
                lease.answered(sent_s=float(sent))
        assert lease.ends_s <= heard_s + 10.0


def test_the_same_seed_places_the_same():
    def placed() -> list[Batch]:
        placement = fleet(20, Capacity(cores=9.6, memory_bytes=64 * GIB))
        placement.add_snapshot("tree", "h0", 0.0)
        return [batch for i in range(100) for batch in placement.place("tree", 7, i * 0.01)]

    assert placed() == placed()


STEP = st.tuples(
    st.sampled_from(["place", "start", "start all", "end", "fail", "silence", "time", "lose", "drop"]),
    st.integers(0, 99),
)


@settings(max_examples=150)
@given(st.lists(STEP, max_size=80))
def test_no_group_has_two_winners_and_no_host_exceeds_its_capacity(steps):
    placement = fleet(4, lease_s=5.0, margin_s=0.5)
    for name in ("h0", "h1"):
        placement.add_snapshot("tree", name, 0.0)
    now_s, silent = 0.0, set[str]()
    alive: dict[int, Batch] = {}  # by group
    sent: list[Batch] = []

    def start(batch: Batch) -> None:
        if placement.started(batch.id, now_s):
            assert alive.get(batch.group, batch) == batch  # never two
            alive[batch.group] = batch

    for what, number in [*steps, ("start all", 0)]:
        batch = sent[number % len(sent)] if sent else None
        if what == "place" and placement.hosts_with("tree"):
            sent += placement.place("tree", 1 + number % 12, now_s)
        elif what == "start" and batch is not None:
            start(batch)
        elif what == "start all":
            for each in sent:
                start(each)
        elif what == "end" and batch is not None:
            placement.ended(batch.id, batch.n)
            if alive.get(batch.group) == batch:
                del alive[batch.group]
        elif what == "fail" and batch is not None and batch not in alive.values():
            new = placement.failed(batch.id, now_s)
            sent += [new] if new else []
        elif what == "silence":
            silent ^= {f"h{number % 4}"}
        elif what == "drop":
            placement.remove_snapshot("tree", f"h{number % 4}")
        elif what in ("time", "lose"):
            now_s += 0.3 if what == "time" else 2.0
            for i in range(4):
                name = f"h{i}"
                if name not in silent and not placement.heartbeat(name, now_s):
                    placement.join(name, TEN, now_s)
            review = placement.review(now_s)
            for lost in review.lost:
                assert alive.pop(lost.group).id == lost.id
                again = placement.retry(lost, now_s)
                sent += [again] if again else []
            sent += review.batches
        for host in placement.hosts:
            assert -1e-6 <= host.cores <= 1.0 + 1e-6
            assert host.memory_bytes >= 0
            assert host.queued_s >= 0
