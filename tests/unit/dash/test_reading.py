"""What the pages read, and that they only read: runs in every state, of any length, while they are written."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.postgres_server import PostgresServer
from tests.shown_run import ShownRunFolder
from tests.small_rollouts import finishing
from tests.unit.dash.browse import Browser, texts
from tests.unit.dash.test_pages import PAGES

from etude.cli.dash import readers
from etude.dash import Runs, events
from etude.dash.events import LiveView
from etude.dash.runs import Aged
from etude.dashboard.run_view import RunView
from etude.experience import Ledger
from etude.experience.transitions import State
from etude.loop.locations import ledger_location
from etude.run import RunFolder
from etude.telemetry import Telemetry


def content(folder: Path) -> dict[str, tuple[int, str]]:
    """Each file below a folder: when it was changed, and its digest."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def copy(shown: ShownRunFolder, tmp_path: Path) -> Path:
    """A copy of the run as it is after its conductor was killed: its ledger's log is there."""
    return Path(shutil.copytree(shown.path, tmp_path / "runs" / "laptop"))


@pytest.mark.parametrize("killed", [True, False])
def test_all_pages_change_no_byte_and_create_no_file(
    killed: bool, copy: Path, releases: Path, privacy: Path, feedback: Path
) -> None:
    if not killed:  # the last connection moves the log into the file, and deletes it
        Ledger(copy / "ledger.sqlite", capacity=64).close()
        assert not (copy / "ledger.sqlite-wal").exists()
    folders = (copy, releases.parent, privacy, feedback.parent)
    before = [content(folder) for folder in folders]
    browser = Browser(copy, releases=releases, privacy=privacy, feedback=feedback)
    for page in PAGES:
        assert browser.get(f"/run/laptop/{page}").status_code == 200
    for page in ("/releases", "/releases/1", "/consent"):
        assert browser.get(page).status_code == 200
    for folder, files in zip(folders, before, strict=True):
        now = content(folder)
        if killed:  # readers of a log share memory in a file, which has no content of the ledger
            now.pop("ledger.sqlite-shm", None)
            files.pop("ledger.sqlite-shm", None)
        assert now == files


def test_a_run_can_be_taken_and_written_while_its_pages_are_read(copy: Path) -> None:
    browser = Browser(copy)
    stopping, failed = threading.Event(), list[object]()

    def look() -> None:
        while not stopping.is_set():
            for page in ("", "rollouts", "versions"):
                found = browser.get(f"/run/laptop/{page}")
                if found.status_code != 200:
                    failed.append(found.text)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run = RunFolder.open(copy)
        run.lock()
        ledger = readers().ledger(run)
        ledger.close()
        writing = Ledger(copy / "ledger.sqlite", capacity=64)
        for row in writing.rows(states=[State.RUNNING]):
            writing.move(row.rollout_id, "cancelled", reason="the run ends")
        writing.close()
        run.unlock()
    finally:
        stopping.set()
        thread.join()
    assert not failed
    assert "cancelled" in texts(browser.get("/run/laptop/rollouts/g900000.0"))


MISSING = (
    "run.json",
    "config.toml",
    "events",
    "ledger.sqlite",
    "weights",
    "traces",
    "tokenizer",
    "phases.json",
    "rollouts",
)


@pytest.mark.parametrize("how", ["missing", "empty", "half", "garbage", "a folder"])
@pytest.mark.parametrize("name", MISSING)
def test_a_run_without_one_of_its_parts_shows_the_others(name: str, how: str, copy: Path) -> None:
    for log in copy.glob("ledger.sqlite-*"):
        log.unlink() if name == "ledger.sqlite" else None
    whole = copy / name
    for path in [one for one in (whole, *whole.rglob("*")) if one.is_file()] if whole.exists() else []:
        data = path.read_bytes()
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how != "missing":
            path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "garbage": b"\x00\xff{" * 99}[how])
    if how == "missing" and whole.is_dir():
        shutil.rmtree(whole)
    browser = Browser(copy)
    for page in PAGES:
        found = browser.get(f"/run/laptop/{page}")
        assert found.status_code == 200 or (found.status_code == 404 and "rollouts/" in page), (page, found.text)
    page = texts(browser.get("/run/laptop/"))
    if how == "missing" and name in ("run.json", "config.toml", "events"):
        assert f"{name} is missing" in page
    if name == "ledger.sqlite" and how in ("missing", "garbage"):
        assert "rollouts: " in page, "the overview says that they cannot be read"
        assert "v000003" in texts(browser.get("/run/laptop/versions")), "versions are there without the ledger"
    if name == "weights" and how != "a folder":
        table = texts(browser.get("/run/laptop/versions"))
        assert "weights unknown" in table, "steps are there without the weights"
    if name == "traces" and how != "a folder":
        assert "its turns cannot be shown" in texts(browser.get("/run/laptop/rollouts/g000002.1")) or "prompt" in texts(
            browser.get("/run/laptop/rollouts/g000002.1")
        )


def test_a_ledger_on_a_server_is_shown_as_one_in_a_file(tmp_path: Path, postgres: PostgresServer) -> None:
    run = RunFolder.create(tmp_path / "served", config_toml=f'[experience]\nledger = "{postgres.url}"\n', seed=0)
    ledger = Ledger(ledger_location(run), capacity=8)
    finishing(ledger)("g000000", [0.0, 1.0])
    browser = Browser(run.path)
    page = texts(browser.get("/run/served/rollouts"))
    ledger.close()
    assert "g000000.0 graded 0 – 0" in page
    assert "g000000.1 graded 1 – 0" in page
    assert "admitted" in texts(browser.get("/run/served/rollouts/g000000.1")), "its history"
    postgres.kill()
    try:
        found = browser.get("/run/served/rollouts")
    finally:
        postgres.start()
    assert found.status_code == 200
    assert "the ledger" in texts(found), "it says what cannot be reached"


def test_a_folder_with_nothing_but_the_first_events_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "new" / "events").mkdir(parents=True)
    (tmp_path / "new" / "events" / "conductor.jsonl").write_bytes(b'{"t": 1.0, "process": "conductor", "kind": "pha')
    browser = Browser(tmp_path / "new")
    for page in PAGES:
        assert browser.get(f"/run/new/{page}").status_code in (200, 404)
    page = texts(browser.get("/run/new/"))
    assert "no events yet" in page
    assert "run.json is missing" in page
    assert "has no ledger" in page or "does not exist" in page or "cannot be opened" in page


def test_what_a_run_writes_is_shown_by_the_next_request(copy: Path) -> None:
    browser = Browser(copy)
    assert "engine-7" not in texts(browser.get("/run/laptop/fleet"))
    log = Telemetry(copy / "events" / "engine-7.jsonl", process="engine-7")
    log.event("engine.load", num_running=5, num_waiting=0, tokens=100, busy_share=0.5)
    assert "engine-7" in texts(browser.get("/run/laptop/fleet"))
    log.close()


def test_a_count_that_is_dear_is_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [100.0], list[int]()
    monkeypatch.setattr("etude.dash.runs.time.monotonic", lambda: now[0])

    def dear() -> int:
        now[0] += 2.0
        calls.append(1)
        return len(calls)

    value = Aged(dear)
    assert value.get(10.0).value == 1
    now[0] += 99.0
    assert value.get(10.0).value == 1, "it cost 2 s, so that it is kept for 100"
    now[0] += 2.0
    assert value.get(10.0).value == 2


def test_a_page_does_not_wait_for_a_count(shown: ShownRunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = threading.Event()
    value = Aged(lambda: counting.wait(20.0))
    assert value.get(0.0).value is None
    assert value.get(0.0).value is None, "nor is it begun twice"
    counting.set()
    assert value.get(20.0).value is True


def test_pages_of_a_ledger_use_its_indexes(shown: ShownRunFolder) -> None:
    database = sqlite3.connect(shown.path / "ledger.sqlite")
    asked = list[str]()
    with Traced(shown, asked) as ledger:
        for state in (None, State.TRAINED):
            for step in (None, 2):
                for before in (None, 10):
                    ledger.page(limit=5, before=before, step=step, state=state)
        ledger.last_steps(limit=3, before=3)
        ledger.step_counts([1, 2])
        ledger.find_rows(["g000001.0"])
        ledger.group_rows("g000001")
        ledger.history("g000001.0")
        ledger.quarantine_of("g000001.0")
    assert len(asked) > 10
    for sql in asked:
        plan = " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {sql}", ["1"] * sql.count("?")))
        assert "SCAN" not in plan or "USING COVERING INDEX" in plan, f"{sql}: {plan}"
        assert "TEMP B-TREE" not in plan or "WHERE group_id" in sql or "GROUP BY step, state" in sql, f"{sql}: {plan}"
    database.close()


class Traced:
    """A ledger whose statements are kept."""

    def __init__(self, shown: ShownRunFolder, asked: list[str]) -> None:
        self.ledger = readers().ledger(RunFolder(shown.path))
        rows = self.ledger._db.rows
        self.ledger._db.rows = lambda sql, *values: (asked.append(sql), rows(sql, *values))[1]  # type: ignore[method-assign]

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self.ledger

    def __exit__(self, *given: object) -> None:
        self.ledger.close()


# events in bounded memory


def write_events(folder: Path, files: dict[str, list[bytes]]) -> Path:
    (folder / "events").mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / "events" / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def line(t: float, kind: str, **facts: object) -> bytes:
    return json.dumps({"t": t, "process": "p", "kind": kind, **facts}).encode()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    block=st.integers(200, 700),
    first=st.integers(150, 500),
    added=st.integers(0, 10),
)
def test_events_are_the_same_in_blocks_of_any_size(
    sizes: list[int], block: int, first: int, added: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    lines = [line(i, "rl.step", step=i, note="x" * size) for i, size in enumerate(sizes)]
    write_events(folder, {"conductor": lines, "b": lines[:3]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "BLOCK_BYTES", block)
        patch.setattr(events, "FIRST_BYTES", first)
        view = LiveView(folder)
        with (folder / "events" / "conductor.jsonl").open("ab") as file:
            for i in range(added):
                file.write(line(1000 + i, "rl.step", step=1000 + i) + b"\n")
            file.write(b'{"t": 5')
        while True:
            view.refresh(10.0)
            if view.share_read == 1.0:
                break
        view.refresh()
    assert view.events("rl.step") == RunView(folder).events("rl.step")
    assert view.num_dropped == 0
    assert view.unreadable() == ["events/conductor.jsonl ends within a line"]


def test_of_a_long_run_a_bounded_number_of_events_is_kept_and_the_newest_are_there_at_once(tmp_path: Path) -> None:
    lines = [line(i, "rollout", rollout_id=f"g{i}", wall_s=1.0) for i in range(60_000)]
    lines += [line(100_000 + i, "rl.step", step=i, reward_mean=0.5) for i in range(20_000)]
    lines += [line(200_000, "phase", phase="rl", state="start")]
    view = LiveView(write_events(tmp_path, {"conductor": lines}))
    newest = view.latest("rl.step")
    assert newest is not None
    assert newest["step"] == 19_999
    while view.share_read < 1.0:
        view.refresh(0.2)
    steps = [event["step"] for event in view.events("rl.step")]
    assert len(steps) <= events.THINNED["rl.step"]
    assert (steps[0] < 100, steps[-1]) == (True, 19_999)
    assert steps == sorted(steps)
    assert not view.events("rollout"), "the ledger has them"


def test_a_file_of_events_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    view = LiveView(write_events(tmp_path, {"a": [line(i, "phase", phase="rl", state="start") for i in range(9)]}))
    write_events(tmp_path, {"a": [line(99, "session")]})
    view.refresh()
    assert view.latest("session") is not None


def test_runs_beyond_a_few_are_let_go_of(tmp_path: Path) -> None:
    for i in range(7):
        write_events(tmp_path / f"run-{i}", {"a": [line(i, "session")]})
    runs = Runs(tmp_path, readers())
    assert all(runs.get(f"run-{i}") is not None for i in range(7))
    assert [*runs._open] == ["run-3", "run-4", "run-5", "run-6"]
