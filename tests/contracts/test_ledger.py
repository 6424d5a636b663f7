"""What every ledger promises, in a file and on a server. A further database joins with one line in PLACES."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.small_rollouts import Kit, finishing, read

from etude.errors import LedgerError
from etude.experience import Finished, Ledger, Window, database, make_batch, plan_batch
from etude.experience.database import NoLedger
from etude.experience.open_database import open_database
from etude.experience.transitions import HOLDING, MOVES, TERMINAL, State
from etude.records.completion import Version
from etude.records.rollout import Fork
from etude.records.summary import BatchRef
from etude.records.wire import unpack

FORMAT = Path(__file__).parents[2] / "docs/formats/ledger.md"
PLACES: dict[str, Callable[[pytest.FixtureRequest, Path], Path | str]] = {
    "sqlite": lambda request, folder: folder / "ledger.sqlite",
    "postgres": lambda request, folder: f"{request.getfixturevalue('postgres').url}#{folder.name}",
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return PLACES[request.param](request, tmp_path)


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def ledger(place: Path | str) -> Iterator[Ledger]:
    opened = Ledger(place, capacity=8)
    yield opened
    opened.close()


@pytest.fixture
def finish_group(ledger):
    return finishing(ledger)


def batch_of(ledger, *group_ids, step=1):
    groups = [ledger.group(g) for g in group_ids]
    return make_batch(plan_batch(groups, batch_id=f"b{step:06d}", step=step, max_lag=9), read)


def test_a_finished_rollout_is_stored_with_its_transition(ledger, kit, finish_group):
    finish_group("g000000", [1.0, 0.0])
    assert ledger.states() == {"graded": 2}
    stored = ledger.group("g000000")
    assert [graded.grade for _, graded in stored.valid] == [1.0, 0.0]
    assert stored.valid[0][0] == kit.summary("g000000.0")


def test_held_siblings_run_or_are_cancelled_in_the_transaction_that_decides(ledger, kit):
    for group, rewards in (("g000000", (1.0, 0.0)), ("g000001", (1.0, 1.0))):
        names = [f"{group}.{i}" for i in range(4)]
        ledger.admit(*map(kit.spec, names), held=names[2:])
        assert [spec.rollout_id for spec in ledger.start(8)][-2:] == names[:2]
        assert ledger.finish_all([(kit.summary(i), kit.graded(r)) for i, r in zip(names, rewards, strict=False)])
    assert ledger.waiting() == []
    assert ledger.states() == {"running": 2, "graded": 4, "cancelled": 2}
    assert ledger.ready_groups(ledger.open_groups()) == {"g000001"}
    assert ledger.slots() == (6, 8)


def test_what_a_finished_rollout_decides_about_is_read_and_no_other_held_rollout(place, kit, monkeypatch):
    read = dict[int, int]()
    for many in (2, 60):
        folder = place.replace("#", f"#{many}-") if isinstance(place, str) else place.with_name(f"{many}")
        with contextlib.closing(Ledger(folder, capacity=4 * many)) as ledger:
            for n in range(many):
                ids = [f"g{n:06d}.{i}" for i in range(4)]
                ledger.admit(*map(kit.spec, ids), held=ids[2:])
            ledger.start(2)
            rows, read[many] = ledger._db.rows, 0

            def counting(*args, many=many, rows=rows):
                found = rows(*args)
                read[many] += len(found)
                return found

            monkeypatch.setattr(ledger._db, "rows", counting)
            assert ledger.finish(kit.summary("g000000.0"), kit.graded(1.0))
            assert ledger.finish(kit.summary("g000000.1"), kit.graded(0.0))
            assert ledger.row("g000000.3").state is State.ADMITTED
    assert read[60] == read[2]


def test_a_forbidden_transition_is_refused_and_changes_nothing(ledger, kit):
    ledger.admit(kit.spec("g000000.0"))
    with pytest.raises(LedgerError, match="from admitted to trained"):
        ledger.move("g000000.0", "trained", reason="hope")
    assert ledger.states() == {"admitted": 1}


def test_a_terminal_state_needs_its_reason(ledger, kit):
    ledger.admit(kit.spec("g000000.0"))
    with pytest.raises(LedgerError, match="needs a reason"):
        ledger.move("g000000.0", "cancelled")


def test_every_terminal_state_releases_its_slot(ledger, kit, finish_group):
    finish_group("g000000", [1.0, 0.0, None])
    ledger.admit(kit.spec("g000001.0"))
    assert ledger.slots() == (3, 8)  # the invalid one has none
    ledger.move("g000001.0", "cancelled", reason="the run ends")
    batch = batch_of(ledger, "g000000")
    ledger.batch(batch)
    assert ledger.slots() == (2, 8)
    ledger.commit(batch.rollout_ids, kit.version(1))
    assert ledger.slots() == (0, 8)
    assert ledger.states() == {"trained": 2, "invalid": 1, "cancelled": 1}


def test_admission_to_a_full_ledger_is_refused(ledger, kit):
    for i in range(8):
        ledger.admit(kit.spec(f"g000000.{i}"))
    with pytest.raises(LedgerError, match="all 8 are in use"):
        ledger.admit(kit.spec("g000001.0"))
    assert ledger.states() == {"admitted": 8}


def test_rollouts_that_do_not_all_fit_are_all_refused(ledger, kit):
    with pytest.raises(LedgerError, match="all 8 are in use"):
        ledger.admit(*[kit.spec(f"g000000.{i}") for i in range(9)])
    with pytest.raises(LedgerError, match=re.escape("g000001.0 was admitted before")):
        ledger.admit(*[kit.spec(f"g00000{i}.0") for i in (0, 1, 1)])
    assert (ledger.states(), ledger.slots(), ledger.num_groups()) == ({}, (0, 8), 0)


def test_rollouts_start_in_order_of_admission_at_the_attempt_that_counts(ledger, kit):
    ledger.admit(*[kit.spec(f"g00000{i}.0") for i in (3, 1, 2)])
    assert [spec.rollout_id for spec in ledger.start(2)] == ["g000003.0", "g000001.0"]
    ledger.move("g000003.0", "requeued", reason="its worker died")
    assert [(spec.rollout_id, spec.attempt) for spec in ledger.start(8)] == [("g000003.0", 1), ("g000002.0", 0)]
    assert ledger.start(8) == []
    assert ledger.states() == {"running": 3}


def test_of_rollouts_that_end_together_each_counts_once(ledger, kit):
    ledger.admit(*[kit.spec(f"g000000.{i}") for i in range(3)])
    ledger.start(2)
    ids = ["g000000.0", "g000000.1", "g000000.0", "g000000.2"]
    ended = [(kit.summary(i), kit.invalid if i == "g000000.1" else kit.graded(number)) for number, i in enumerate(ids)]
    assert ledger.finish_all(ended) == [True, True, False, False]  # delivered twice; never started
    assert ledger.states() == {"graded": 1, "invalid": 1, "admitted": 1}
    assert (ledger.row("g000000.0").reward, ledger.row("g000000.1").boundary) == (0.0, "machine")
    assert ledger.ready_groups(["g000000"]) == set()


def test_continuations_of_a_fork_are_admitted_with_the_end_of_their_rollout_and_count_as_it_does(ledger, kit):
    replace, fork = msgspec.structs.replace, Fork(origin="g000000.0", num_turns=1, num_sampled=4)
    ledger.admit(*[kit.spec(f"g000000.{i}") for i in range(2)])
    ledger.start(2)
    ledger.finish(kit.summary("g000000.1"), kit.graded(0.5))
    ids = ["g000000.0", "g000000.0.1", "g000000.0.2"]
    ended = [(replace(kit.summary(i), fork=fork), kit.graded(float(n))) for n, i in enumerate(ids)]
    late = [(replace(one, attempt=1), outcome) for one, outcome in ended]
    assert ledger.finish_all(late) == [False] * 3
    assert ledger.states() == {"graded": 1, "running": 1}
    assert ledger.ready_groups({"g000000"}) == set()
    assert ledger.finish_all(ended) == [True] * 3
    assert ledger.finish_all(ended) == [False] * 3, "delivered twice"
    assert (ledger.states(), ledger.slots(), ledger.num_groups()) == ({"graded": 4}, (4, 8), 1)
    assert ledger.ready_groups({"g000000"}) == {"g000000"}
    group = ledger.group("g000000")
    assert group.rollout_ids == ("g000000.0", "g000000.0.1", "g000000.0.2", "g000000.1")
    assert [(one.fork, graded.grade) for one, graded in group.valid] == [
        (fork, 0.0),
        (fork, 1.0),
        (fork, 2.0),
        (None, 0.5),
    ]
    assert len({ledger.spec(i).seed for i in ids}) == 3
    batch = batch_of(ledger, "g000000")
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, Version(1, "0" * 8, "0" * 64))
    assert ledger.slots() == (0, 8)
    assert {ledger.row(i).state for i in ids} <= {State.TRAINED, State.NO_SIGNAL}


def test_many_rollouts_take_as_many_statements_as_few(place, kit, monkeypatch):
    """The same calls for 2 and for 24 rollouts; more than `AT_ONCE` take another round of them."""
    monkeypatch.setattr(database, "AT_ONCE", 100)
    counted = {}
    for many in (2, 24, 105):
        ledger = Ledger(
            place.replace("#", f"#{many}-") if isinstance(place, str) else place.with_name(f"{many}"), capacity=many
        )
        counted[many], used = 0, ledger._db

        def count(call, many=many):
            def counting(*args):
                counted[many] += 1
                return call(*args)

            return counting

        used.execute, used.rows = count(used.execute), count(used.rows)
        ledger.admit(*[kit.spec(f"g000000.{i}") for i in range(many)])
        ended = [(kit.summary(spec.rollout_id), kit.graded(spec.attempt)) for spec in ledger.start(many)]
        assert all(ledger.finish_all(ended))
        batch = batch_of(ledger, "g000000")
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(1))
        assert ledger.states() == {"no-signal": many}
        ledger.reconcile([])
        assert ledger.states() == {"graded": many}
        ledger.close()
    assert counted[24] == counted[2]
    assert counted[105] < 2 * counted[2]


def test_a_rollout_without_an_advantage_ends_as_no_signal(ledger, kit, finish_group):
    finish_group("g000000", [1.0, 1.0])
    batch = batch_of(ledger, "g000000")
    assert batch.samples == ()
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, kit.version(1))
    assert ledger.states() == {"no-signal": 2}
    assert ledger.row("g000000.0").version == str(kit.version(1))


def test_rollouts_are_read_page_by_page_the_newest_first(ledger, kit, finish_group):
    for step, group_id in enumerate(("g000000", "g000001"), 1):
        finish_group(group_id, [1.0, 0.0, 0.5])
        batch = batch_of(ledger, group_id, step=step)
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(step))
    ledger.admit(kit.spec("g000002.0"))
    for given in ({}, {"state": State.TRAINED}, {"step": 1}, {"step": 2, "state": State.NO_SIGNAL}):
        expected = [
            row.rollout_id
            for row in reversed(ledger.rows())
            if row.step in (given.get("step", row.step),) and row.state in (given.get("state", row.state),)
        ]
        met, before = [], None
        while page := ledger.page(limit=2, before=before, **given):
            met += [row.rollout_id for _, row in page]
            before = page[-1][0]
        assert met == expected
    assert ledger.last_steps(limit=1) == [2]
    assert ledger.last_steps(limit=5, before=2) == [1]
    counts = ledger.step_counts([1, 2, 3])
    assert set(counts) == {1, 2}
    assert counts[1].batch_id == "b000001"
    assert sum(counts[1].states.values()) == 3
    assert counts[1].reward_mean == 0.5
    assert ledger.quarantine_of("g000000.0") is None


def test_a_group_is_taken_by_one_batch_only(ledger, finish_group):
    finish_group("g000000", [1.0, 0.0])
    batch = batch_of(ledger, "g000000")
    ledger.batch(batch)
    assert ledger.open_groups() == []
    with pytest.raises(LedgerError, match="is in batch b000001"):
        ledger.batch(batch)


def test_a_batch_with_a_running_member_is_refused_as_a_whole(ledger, kit, finish_group):
    finish_group("g000000", [1.0, 0.0])
    ledger.admit(kit.spec("g000000.2"))
    with pytest.raises(LedgerError, match="its state is admitted"):
        ledger.batch(batch_of(ledger, "g000000"))
    assert ledger.states() == {"graded": 2, "admitted": 1}
    assert ledger.open_groups() == ["g000000"]


def test_the_answer_of_an_attempt_given_up_is_not_counted(ledger, kit):
    ledger.admit(kit.spec("g000000.0"))
    ledger.move("g000000.0", "running")
    ledger.move("g000000.0", "requeued", reason="its worker died")
    assert ledger.spec("g000000.0").attempt == 1
    ledger.move("g000000.0", "running")
    assert not ledger.finish(kit.summary("g000000.0", attempt=0), kit.graded(1.0))
    assert ledger.finish(kit.summary("g000000.0", attempt=1), kit.graded(0.0))
    assert not ledger.finish(kit.summary("g000000.0", attempt=1), kit.graded(1.0))  # delivered twice
    assert [graded.grade for _, graded in ledger.group("g000000").valid] == [0.0]


def test_a_rollout_whose_worker_left_nothing_is_invalid_data_of_its_group(ledger, kit):
    ledger.admit(kit.spec("g000000.0"))
    ledger.move("g000000.0", "running")
    ledger.fail("g000000.0", kit.invalid)
    stored = ledger.group("g000000")
    assert ledger.ready_groups(["g000000"]) == {"g000000"}
    assert (stored.valid, stored.invalid) == ((), (kit.invalid,))
    assert ledger.row("g000000.0").boundary == "machine"


def test_groups_come_in_order_of_admission_whatever_finished_first(ledger, kit, finish_group):
    ledger.admit(kit.spec("g000007.0"))
    finish_group("g000003", [1.0])
    assert ledger.open_groups() == ["g000007", "g000003"]
    assert ledger.ready_groups(ledger.open_groups()) == {"g000003"}
    assert ledger.num_groups() == 2


def test_a_failed_transaction_leaves_neither_rollouts_nor_cursor(ledger, kit):
    def work():
        ledger.admit(kit.spec("g000000.0"))
        ledger.move_cursor("train", 1)
        ledger.admit(kit.spec("g000000.0"))

    with pytest.raises(LedgerError, match="admitted before"):
        ledger.transaction(work)
    assert (ledger.states(), ledger.cursor("train"), ledger.slots()) == ({}, 0, (0, 8))


def test_an_inner_failure_undoes_only_itself(ledger, kit):
    def work():
        ledger.admit(kit.spec("g000000.0"))
        with pytest.raises(LedgerError):
            ledger.admit(kit.spec("g000000.0"))
        ledger.move_cursor("train", 1)

    ledger.transaction(work)
    assert (ledger.states(), ledger.cursor("train")) == ({"admitted": 1}, 1)


def test_after_a_restart_the_ledger_agrees_with_the_lineage(place, kit, finish_group, ledger):
    finish_group("g000000", [1.0, 0.0])
    finish_group("g000001", [1.0, 0.0])
    first, second = batch_of(ledger, "g000000"), batch_of(ledger, "g000001", step=2)
    ledger.batch(first)
    ledger.commit(first.rollout_ids, kit.version(1))
    ledger.batch(second)
    ledger.admit(kit.spec("g000002.0"))
    ledger.move("g000002.0", "running")
    ledger.close()

    reopened = Ledger(place, capacity=8)
    mended = reopened.reconcile([(1, first.rollout_ids), (2, second.rollout_ids)])  # killed between pointer and commit
    assert (mended.trained, mended.freed, mended.requeued) == (2, 0, 1)
    assert reopened.waiting() == ["g000002.0"]
    assert reopened.spec("g000002.0").attempt == 1

    mended = reopened.reconcile([(1, first.rollout_ids)])  # the learner goes back to step 1
    assert (mended.trained, mended.freed, mended.requeued) == (0, 2, 0)
    assert reopened.open_groups() == ["g000001", "g000002"]
    assert [graded.grade for _, graded in reopened.group("g000001").valid] == [1.0, 0.0]
    reopened.close()


def test_a_lost_lineage_borrows_slots_and_gives_them_back(ledger, kit, finish_group):
    finish_group("g000000", [1.0, 0.0])
    batch = batch_of(ledger, "g000000")
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, kit.version(1))
    for i in range(8):
        ledger.admit(kit.spec(f"g000001.{i}"))
    assert ledger.reconcile([]).freed == 2
    assert ledger.slots() == (10, 10)
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, kit.version(1))
    assert ledger.slots() == (8, 8)


def test_invalid_members_of_a_lost_step_are_open_with_their_group(ledger, finish_group):
    finish_group("g000000", [None, None])
    ledger.batch(batch_of(ledger, "g000000"))
    assert ledger.open_groups() == []
    ledger.reconcile([])
    assert ledger.open_groups() == ["g000000"]
    assert ledger.states() == {"invalid": 2}


def test_pruning_keeps_what_a_restart_may_need(ledger, kit, finish_group):
    for step in (1, 2):
        finish_group(f"g00000{step}", [1.0, 0.0])
        batch = batch_of(ledger, f"g00000{step}", step=step)
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(step))
    assert ledger.prune(1) == 4  # a spec and a record of each
    assert ledger.get("g000001.0", "finished") is None
    assert ledger.get("g000002.0", "finished") is not None
    with pytest.raises(LedgerError, match="no longer stored"):
        ledger.spec("g000001.0")


def test_a_record_that_cannot_be_read_is_named(ledger, finish_group):
    finish_group("g000000", [1.0])
    ledger.put("g000000.0", "finished", b"\x93not a record")
    with pytest.raises(LedgerError, match=re.escape("finished of rollout g000000.0")):
        ledger.group("g000000")
    ledger.move("g000000.0", "quarantined", reason="cannot be read")
    assert ledger.group("g000000").finished == ()


def test_history_has_every_transition_of_a_rollout(ledger, finish_group):
    finish_group("g000000", [1.0, 0.0])
    ledger.batch(batch_of(ledger, "g000000"))
    assert [step["state"] for step in ledger.history("g000000.0")] == ["admitted", "running", "graded", "batched"]
    assert ledger.history("g000000.0")[-1]["batch_id"] == "b000001"


def test_blobs_of_a_rollout_come_back_and_unknown_rollouts_have_none(ledger, kit):
    ledger.admit(kit.spec("g000000.0"))
    ledger.put("g000000.0", "log", b"x")
    ledger.put("g000000.0", "log", b"y")
    assert ledger.get("g000000.0", "log") == b"y"
    assert ledger.get("g000000.0", "nothing") is None
    with pytest.raises(LedgerError, match="not in the ledger"):
        ledger.put("g000009.0", "log", b"x")


def test_a_ledger_opened_with_another_capacity_is_refused(ledger, place):
    ledger.close()
    with pytest.raises(LedgerError, match="has 8 slots"):
        Ledger(place, capacity=9)


def test_a_reader_sees_what_the_writer_committed(ledger, place, kit):
    ledger.admit(kit.spec("g000000.0"))
    reader = Ledger.open_readonly(place)
    assert reader.states() == {"admitted": 1}
    ledger.move("g000000.0", "running")
    assert reader.states() == {"running": 1}
    with pytest.raises(LedgerError, match=r"cannot be used|is read-only"):
        reader.move("g000000.0", "cancelled", reason="a reader may not")
    reader.close()


def test_slots_that_do_not_add_up_stop_the_next_commit_of_any_writer(ledger, kit, place):
    ledger.admit(kit.spec("g000000.0"))
    ledger.close()
    other = open_database(place, log=print)
    other.execute("UPDATE slots SET rollout_id = NULL")
    other.close()
    reopened = Ledger(place, capacity=8)
    with pytest.raises(LedgerError, match="slots in the ledger are inconsistent"):
        reopened.move("g000000.0", "running")
    assert reopened.states() == {"admitted": 1}
    reopened.close()


def test_opening_a_missing_ledger_for_reading_is_an_error_and_creates_no_file(place):
    for _ in range(2):
        with pytest.raises(NoLedger):
            Ledger.open_readonly(place)


def test_a_ledger_of_another_format_is_refused(ledger, place):
    ledger.remember("format", 99)
    ledger.close()
    with pytest.raises(LedgerError, match="format 99"):
        Ledger(place, capacity=8)
    with pytest.raises(LedgerError, match="format 99"):
        Ledger.open_readonly(place)


def test_verify_accepts_an_undamaged_ledger(ledger, finish_group):
    finish_group("g000000", [1.0, None])
    ledger.verify()


def test_work_that_fails_for_a_reason_of_its_own_is_undone_and_the_next_goes_through(ledger, kit):
    def work():
        ledger.admit(kit.spec("g000000.0"))
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError):
        ledger.transaction(work)
    assert ledger.states() == {}
    ledger.admit(kit.spec("g000000.0"))
    assert ledger.states() == {"admitted": 1}


def test_terminal_states_hold_no_slot_and_only_a_lost_lineage_reopens_them():
    assert not HOLDING & TERMINAL
    reopened = {move.origin for move in MOVES if move.origin in TERMINAL}
    assert reopened == {State.TRAINED, State.NO_SIGNAL}
    assert {move.to for move in MOVES if move.origin in reopened} == {State.REQUEUED}
    assert {move.to for move in MOVES} | {State.HELD} == set(State)


def test_the_format_page_shows_the_same_table():
    rows = re.findall(r"^\| `([a-z-]+)` → `([a-z-]+)` \| (.+) \|$", FORMAT.read_text(), re.M)
    assert rows == [(move.origin, move.to, move.when) for move in MOVES]


def test_what_is_stored_of_a_rollout_is_its_summary_packed(ledger, kit, finish_group):
    finish_group("g000000", [1.0])
    data = ledger.get("g000000.0", "finished")
    assert unpack(data, Finished).summary == kit.summary("g000000.0")


def test_a_lineage_that_went_back_is_pruned_again_when_it_has_come_as_far(ledger, kit, finish_group):
    for again in (False, True):
        finish_group("g00000" + str(int(again)), [1.0, 0.0])
        batch = batch_of(ledger, *ledger.open_groups(), step=2)
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(2))
        assert ledger.prune(2) == 4
        ledger.reconcile([(1, ["none of them"])] if not again else [(2, batch.rollout_ids)])
    assert ledger.get("g000001.0", "finished") is None


def test_a_rollout_that_demands_a_later_version_waits_and_is_not_overtaken(ledger: Ledger) -> None:
    specs = [msgspec.structs.replace(Kit.spec(f"g00000{i}.0"), min_step=step) for i, step in enumerate([0, 1, 2, 2])]
    ledger.admit(*specs)
    assert [spec.min_step for spec in ledger.start(4, published=1)] == [0, 1]
    assert ledger.start(4, published=1) == []
    assert ledger.states() == {"running": 2, "admitted": 2}
    assert [spec.min_step for spec in ledger.start(1, published=2)] == [2]
    assert [spec.min_step for spec in ledger.start(4)] == [2]


def test_what_the_next_step_waits_for_starts_whatever_version_it_was_admitted_for(ledger: Ledger) -> None:
    """After a lost lineage the steps up to the version that it demands may wait for it."""
    window = Window(max_lag=1, groups_per_step=2)
    steps = [5, 5, 5, 6]
    ledger.admit(*[msgspec.structs.replace(Kit.spec(f"g00000{i}.0"), min_step=step) for i, step in enumerate(steps)])
    assert ledger.start(8, published=3) == []
    assert ledger.start(8, published=3, required_step=lambda place: window.required_step(place, batched_step=5)) == []
    started = ledger.start(8, published=3, required_step=lambda place: window.required_step(place, batched_step=4))
    assert [(spec.group_id, spec.min_step) for spec in started] == [("g000000", 3), ("g000001", 3)]
    assert ledger.start(8, published=3, required_step=lambda place: window.required_step(place, batched_step=4)) == []
    started = ledger.start(
        8, published=3, required_step=lambda place: window.required_step(place, batched_step=4, size=3)
    )
    assert [(spec.group_id, spec.min_step) for spec in started] == [("g000002", 3)]
    assert [spec.min_step for spec in ledger.start(8, published=6)] == [6]


def test_a_lost_step_whose_records_were_dropped_leaves_nothing_to_train_and_says_so(ledger, kit, finish_group):
    for step in (1, 2):
        finish_group(f"g00000{step}", [1.0, 0.0, None])
        batch = batch_of(ledger, f"g00000{step}", step=step)
        ledger.batch(batch)
        ledger.commit(batch.rollout_ids, kit.version(step))
    ledger.prune(1)
    mended = ledger.reconcile([])
    assert (mended.gone, mended.freed, mended.trained) == (2, 2, 0)
    assert ledger.states() == {"quarantined": 2, "graded": 2, "invalid": 2}
    assert ledger.open_groups() == ["g000002"], "no batch takes the others"
    assert ledger.row("g000001.0").reason == "its record was deleted, and its step was lost later"
    assert ledger.slots() == (2, 8)
    again = batch_of(ledger, "g000002", step=1)
    ledger.batch(again)
    ledger.commit(again.rollout_ids, kit.version(1))
    assert ledger.reconcile([(1, again.rollout_ids)]).gone == 0
    assert ledger.states() == {"quarantined": 2, "trained": 2, "invalid": 2}


def test_a_step_may_have_more_rollouts_than_a_statement_takes_values(
    place: Path | str, kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite takes 32,766 at most, and here 800 with smaller statements, so that the test is quick."""
    many = 900
    monkeypatch.setattr(database, "AT_ONCE", 50)
    monkeypatch.setattr(database, "IN_ONE", 500)
    with contextlib.closing(Ledger(place, capacity=many)) as ledger:
        if isinstance(place, Path):
            ledger._db._connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 800)  # type: ignore[attr-defined]
        groups = [[f"g{group:06d}.{i}" for i in range(100)] for group in range(many // 100)]
        ids = [i for group in groups for i in group]
        ledger.admit(*map(kit.spec, ids))
        assert len(ledger.start(many)) == many
        for first in range(0, many, 500):
            ledger.finish_all([(kit.summary(i), kit.graded(float(n % 2))) for n, i in enumerate(ids[first:][:500])])
        names = ledger.open_groups()
        assert ledger.ready_groups(names) == set(names)
        batch = BatchRef(
            batch_id="b", step=1, rollout_ids=tuple(ids), sampled=frozenset(ids), num_trained=1, num_masked=0, digest=""
        )
        ledger.batch(batch)
        ledger.commit(ids, kit.version(1))
        assert ledger.states() == {"trained": many}
        assert ledger.reconcile([]).freed == many
        assert ledger.batched_repeatedly(ids) == set()
