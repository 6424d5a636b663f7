"""The listener for ranks of other hosts: authentication, and the error when no host joins."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.config import build
from etude.errors import ConfigError, EtudeError, NoRun, RunError
from etude.loop import rank_hosts
from etude.loop.config import RunConfig
from etude.loop.preflight import check_ranks_at
from etude.loop.rank_hosts import RankListener, new_secret, parse_address, serve_ranks, sign
from etude.run import RunFolder


def refuse(error: EtudeError, rank: int | None) -> None:
    raise AssertionError(error)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "r", config_toml="", seed=0)
    (folder.path / "logs").mkdir()
    return folder.path


def knocked(at: str, said: bytes) -> bytes:
    """What a listener says to who says this; "" where it hangs up."""
    with socket.create_connection(parse_address(at), timeout=60) as sock:
        assert json.loads(sock.makefile("rb").readline())["nonce"]
        sock.sendall(said)
        try:
            return sock.recv(1)
        except ConnectionResetError:  # with something unread
            return b""


SEALS = ("", "00", sign(bytes(32), json.dumps({}).encode()).hex())  # none, a short one, one with another secret
GUEST = {"host": "there", "count": 1, "nonce": "n"}


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"{}\n",
        b"x" * 9000,
        b"[]\n",
        b"[" * 4000 + b"\n",
        b'{"text": "{}", "seal": "\xc3\xa4"}\n',
        b'{"text": "\\ud800", "seal": ""}\n',
        *(json.dumps({"text": json.dumps(GUEST), "seal": s}).encode() + b"\n" for s in SEALS),
    ],
)
def test_a_connection_without_the_secret_is_refused(run: Path, said: bytes) -> None:
    listener = RankListener(run, "127.0.0.1", 1, new_secret(), refuse)
    assert knocked(listener.at, said) == b""


def test_a_client_that_sends_the_secret_byte_by_byte_is_disconnected(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_hosts, "HANDSHAKE_S", 1.0)
    listener = RankListener(run, "127.0.0.1", 1, new_secret(), refuse)
    with socket.create_connection(parse_address(listener.at), timeout=60) as sock:
        assert json.loads(sock.makefile("rb").readline())["nonce"]
        sock.settimeout(0.2)
        for _ in range(60):
            try:
                sock.sendall(b"x")
                if not sock.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        raise AssertionError("it is still listened to")


def test_where_ranks_are_met_is_told_to_the_runs_owner_alone(run: Path) -> None:
    listener = RankListener(run, "127.0.0.1", 1, new_secret(), refuse)
    told = run / "logs" / "learner.address"
    assert json.loads(told.read_text())["at"] == listener.at
    assert stat.S_IMODE(told.stat().st_mode) == 0o600


def test_ranks_that_do_not_come_are_an_error_that_says_how_to_start_them(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_hosts, "CONNECT_S", 0.05)
    waited: list[str] = []
    listener = RankListener(run, "127.0.0.1", 3, new_secret(), refuse)
    with pytest.raises(RunError, match=f"3 of 3 ranks have not connected to {listener.at}") as caught:
        listener.wait_for_ranks(1, "127.0.0.1:1", waited.append)
    assert caught.value.facts.endswith("connected: none")
    assert caught.value.hint == f"start them: python -m etude.loop.rank_hosts --run {run} --count 3"
    assert waited == [f"3 of 3 ranks have not connected to {listener.at}"]


def test_a_host_with_ranks_leaves_when_the_run_needs_no_learner_any_more(run: Path) -> None:
    RunFolder.open(run).end_phase("eval-after", wall_s=1.0)
    serve_ranks(run, 1)


def meet(listener: RankListener, waits: Callable[[str], None]) -> None:
    """In a thread: what it says when its time is over, long after the test, is nobody's."""
    with contextlib.suppress(RunError):
        listener.wait_for_ranks(1, "127.0.0.1:1", waits)


def test_too_many_ranks_are_sent_back_and_both_sides_say_so(run: Path) -> None:
    said = threading.Event()
    waited: list[str] = []

    def waits(reason: str) -> None:
        waited.append(reason)
        if "connected, " in reason:
            said.set()

    listener = RankListener(run, "127.0.0.1", 1, new_secret(), refuse)
    threading.Thread(target=meet, args=(listener, waits), daemon=True).start()
    with pytest.raises(RunError, match="2 ranks connected, 1 is needed") as caught:
        serve_ranks(run, 2)
    assert caught.value.hint.endswith("--count 1")
    assert said.wait(60)
    assert re.search(
        r"1 of 1 ranks have not connected to \S+ \(2 ranks connected, 1 is needed, from .*: refused\)", waited[-1]
    )


def test_ranks_that_do_not_fit_now_wait_and_both_sides_say_so(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    too_many = threading.Event()

    def waits(reason: str) -> None:
        if (
            reason.startswith("1 of 3 ranks have not connected")
            and "2 of " in reason
            and reason.endswith(" are too many)")
        ):
            too_many.set()

    listener = RankListener(run, "127.0.0.1", 3, new_secret(), refuse)
    threading.Thread(target=meet, args=(listener, waits), daemon=True).start()
    for _ in range(2):
        threading.Thread(target=serve_ranks, args=(run, 2), daemon=True).start()
    assert too_many.wait(60)
    said, end = "", time.monotonic() + 60
    while "2 ranks connected, 1 is needed; they wait for another learner" not in said:
        assert time.monotonic() < end
        said += capfd.readouterr().out
        time.sleep(0.01)


@pytest.mark.parametrize("there", ["nothing", "a checkpoint"])
def test_serving_ranks_for_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    monkeypatch.setattr(rank_hosts, "CONNECT_S" if there == "nothing" else "HANDSHAKE_S", 0.05)
    folder = tmp_path / "other"
    if there == "a checkpoint":
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    with pytest.raises(NoRun, match="is not a run"):
        serve_ranks(folder, 1)
    assert f"{folder} is not a run yet: waiting up to 0.05 s" in capsys.readouterr().out


@pytest.mark.parametrize("count", ["0", "-1", "two"])
def test_a_number_of_ranks_is_at_least_one(count: str) -> None:
    argv = [sys.executable, "-m", "etude.loop.rank_hosts", "--run", "r", "--count", count]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert f"{count!r} is not a number of ranks (1 or more)" in ended.stderr


def test_an_address_that_is_not_of_this_machine_is_refused_before_a_run_is_made() -> None:
    with pytest.raises(ConfigError, match=r"fleet.ranks_at = '192.0.2.1'"):
        check_ranks_at("192.0.2.1")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks_away": 1}, "set both, or neither"),
        ({"ranks_at": "10.0.0.1"}, "set both, or neither"),
        ({"ranks_away": 2, "ranks_at": "10.0.0.1"}, "rank 0 must run on the run's own machine"),
    ],
)
def test_ranks_away_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(RunConfig, {"learner": {"ranks": 2}, "fleet": settings})
