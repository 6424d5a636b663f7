"""A ledger's server that is killed, unreachable, silent, or cut off around a COMMIT; a second conductor; no login."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import psycopg
import pytest
from tests.faults.test_ledger import CHILD, lineage_of
from tests.postgres_server import PostgresServer, programs
from tests.running import Running
from tests.small_disk import fill, small_disk
from tests.small_rollouts import Kit

from etude.errors import LedgerError, StoreError
from etude.experience import Ledger, audit, postgres_session
from etude.experience import postgres as postgres_module
from etude.experience.open_database import check_server


class Between:
    """A TCP relay before a server, that does a thing to the connection whose client sends `COMMIT`."""

    def __init__(self, port: int, at_commit: str = "") -> None:
        self._to, self.at_commit, self.num_commits = port, at_commit, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._held += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if b"COMMIT" in data and self.at_commit:
                    self.num_commits += 1
                    how, self.at_commit = self.at_commit, ""
                    if how == "before":  # the server never hears of it, and does not hear that the client is gone
                        return client.shutdown(socket.SHUT_RDWR)
                    client.shutdown(socket.SHUT_WR)  # the server does it, and its answer goes nowhere
                    server.sendall(data)
                    return client.shutdown(socket.SHUT_RDWR)
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self._listener, *self._held):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextmanager
def between(server, folder, at_commit: str = "") -> Iterator[tuple[Between, str]]:
    relay = Between(server.port, at_commit)
    try:
        yield relay, f"{server.url.replace(str(server.port), str(relay.port))}#{folder.name}"
    finally:
        relay.close()


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def place(postgres, tmp_path) -> str:
    return f"{postgres.url}#{tmp_path.name}"


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_transaction_whose_commit_got_no_response_is_applied_once(postgres, tmp_path, kit, how):
    said: list[str] = []
    calls = 0
    with between(postgres, tmp_path) as (relay, place):
        ledger = Ledger(place, capacity=8, log=said.append)

        def work() -> None:
            nonlocal calls
            calls += 1
            ledger.admit(kit.spec("g000000.0"))
            ledger.move_cursor("train", ledger.cursor("train") + 1)

        relay.at_commit = how
        ledger.transaction(work)
        assert relay.num_commits == 1
        assert len(said) == 1
        assert calls == (1 if how == "after" else 2)
        assert (ledger.states(), ledger.cursor("train"), ledger.num_groups()) == ({"admitted": 1}, 1, 1)
        ledger.close()
    reopened = Ledger(f"{postgres.url}#{tmp_path.name}", capacity=8)
    assert (reopened.states(), reopened.cursor("train")) == ({"admitted": 1}, 1)
    reopened.close()


def test_a_server_that_is_killed_and_comes_back_costs_a_wait(postgres, place, kit):
    said: list[str] = []
    ledger = Ledger(place, capacity=8, log=said.append)
    for number in range(3):
        ledger.admit(kit.spec(f"g{number:06d}.0"))
        postgres.kill()
        postgres.start()
        assert ledger.states() == {"admitted": number + 1}
    assert len(said) == 3
    ledger.close()


def test_no_rollout_is_lost_or_trained_twice_when_the_ledger_server_is_killed(postgres, tmp_path, place):
    rng = random.Random(3)
    (tmp_path / "lineage").touch()
    argv = [sys.executable, "-X", "faulthandler", "-c", CHILD, str(tmp_path), place]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as conductor:
        assert conductor.stdout is not None
        finished = set()
        for _ in range(4):
            for _ in range(rng.randint(3, 15)):
                words = conductor.stdout.readline().decode().split()
                assert len(words) == 2, f"the conductor ended with its server: exit code {conductor.wait(10)}"
                finished.add(words[1])
            postgres.kill()
            postgres.start()
        finished |= {conductor.stdout.readline().decode().split()[1]}
        os.kill(conductor.pid, signal.SIGKILL)
    lineage = [*enumerate(lineage_of(tmp_path), 1)]
    ledger = Ledger(place, capacity=4)
    ledger.reconcile(lineage)
    audit(ledger, tmp_path / "traces", lineage).require_sound()
    consumed = {i for _, step in lineage for i in step}
    assert all(ledger.row(i).state == "graded" for i in finished - consumed)
    assert len(lineage) >= 3
    ledger.close()


def test_a_second_conductor_is_refused_by_name_until_the_first_is_gone(place, kit):
    script = "import sys; from etude.experience import Ledger; Ledger(sys.argv[1], capacity=8); print(1, flush=True)"
    argv = [sys.executable, "-c", f"{script}; sys.stdin.read()", place]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        with pytest.raises(LedgerError, match="written by another conductor") as caught:
            Ledger(place, capacity=8)
        assert f":{first.pid}," in caught.value.facts
        assert Ledger.open_readonly(place).slots() == (0, 8)
        os.kill(first.pid, signal.SIGKILL)
    second = Ledger(place, capacity=8)
    second.admit(kit.spec("g000000.0"))
    second.close()


def test_a_conductor_that_lost_its_lock_to_another_writes_no_more(postgres, tmp_path, kit):
    with between(postgres, tmp_path) as (relay, place):
        first = Ledger(place, capacity=8)
        relay.close()  # cut off; the server notices at once
        second = Ledger(f"{postgres.url}#{tmp_path.name}", capacity=8)
        with between(postgres, tmp_path) as (way, _):
            first._db.session.url = first._db.session.url.replace(str(relay.port), str(way.port))
            with pytest.raises(LedgerError, match="written by another conductor"):
                first.admit(kit.spec("g000000.0"))
        assert second.states() == {}
        first.close()
        second.close()


def test_confirmed_transactions_that_a_server_lost_end_the_run(postgres, place, tmp_path, kit):
    ledger = Ledger(place, capacity=8)
    ledger.admit(kit.spec("g000000.0"))
    with psycopg.connect(postgres.url, autocommit=True) as other:  # as a standby that was behind would have it
        schema = postgres_module.schema_of(tmp_path.name)
        other.execute(f"UPDATE {schema}.meta SET value = '\"an older one\"' WHERE key = 'commit'".encode())
    postgres.kill()
    postgres.start()
    with pytest.raises(LedgerError, match="has changed since the connection broke") as caught:
        ledger.states()
    assert "resume" in caught.value.hint
    ledger.close()


def test_a_server_that_stays_away_is_an_error_in_time_and_one_that_returns_goes_on(postgres, place, kit, monkeypatch):
    monkeypatch.setattr(postgres_module, "RECONNECT_S", 0.5)
    ledger = Ledger(place, capacity=8)
    postgres.kill()
    with pytest.raises(StoreError, match=r"waited 0\.5 s for the ledger's server") as caught:
        ledger.admit(kit.spec("g000000.0"))
    assert "--resume" in caught.value.hint
    postgres.start()
    ledger.admit(kit.spec("g000000.0"))
    assert ledger.states() == {"admitted": 1}
    ledger.close()


def test_a_session_that_hangs_is_given_up_and_ended_and_the_work_done_once(place, kit, monkeypatch):
    said: list[str] = []
    ledger = Ledger(place, capacity=8, log=said.append)
    backend = ledger._db.session.connection.info.backend_pid
    monkeypatch.setattr(postgres_session, "ANSWER_S", 0.0)
    monkeypatch.setattr(postgres_session, "PATIENCE_S", 0.5)
    os.kill(backend, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (backend, signal.SIGCONT)).start()
    ledger.admit(kit.spec("g000000.0"))
    assert (ledger.states(), len(said)) == ({"admitted": 1}, 1)
    ledger.close()


def test_a_connection_that_is_found_closed_is_opened_again(place, kit):
    said: list[str] = []
    ledger = Ledger(place, capacity=8, log=said.append)
    for number, use in enumerate([lambda: ledger.admit(kit.spec("g000000.0")), ledger.states], 1):
        ledger._db.session.connection.close()
        use()
        assert len(said) == number
    assert ledger.states() == {"admitted": 1}
    ledger.close()


def test_a_failed_transaction_does_not_wait_for_a_server_that_hangs(place, kit, monkeypatch):
    said: list[str] = []
    ledger = Ledger(place, capacity=8, log=said.append)
    backend = ledger._db.session.connection.info.backend_pid
    monkeypatch.setattr(postgres_session, "ANSWER_S", 0.0)
    monkeypatch.setattr(postgres_session, "PATIENCE_S", 0.5)

    def work() -> None:
        ledger.admit(kit.spec("g000000.0"))
        os.kill(backend, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (backend, signal.SIGCONT)).start()
        raise LookupError("the work failed")

    with pytest.raises(LookupError, match="the work failed"):
        ledger.transaction(work)
    assert len(said) == 1, "the connection was not cut"
    assert ledger.states() == {}
    ledger.close()


@pytest.fixture
def crowded(tmp_path, monkeypatch) -> Iterator[PostgresServer]:
    """A server on a small disk of its own."""
    bin = programs()
    assert bin is not None
    monkeypatch.setenv("PGPASSWORD", "a-password")
    with small_disk(tmp_path / "disk", "64m") as disk:
        server = PostgresServer(disk, bin)
        yield server
        server.stop()


def test_a_servers_disk_without_room_for_rows_is_an_error_and_goes_on_once_there_is(crowded, kit):
    ledger = Ledger(f"{crowded.url}#a-run", capacity=8)
    ledger.admit(kit.spec("g000000.0"))
    ballast = fill(crowded.folder)
    with pytest.raises(StoreError, match=r"cannot be written.* No space left on device") as caught:
        ledger.put("g000000.0", "log", os.urandom(300_000))
    assert "free the server's disk" in caught.value.hint
    assert (ledger.states(), ledger.get("g000000.0", "log")) == ({"admitted": 1}, None)
    ballast.unlink()
    ledger.put("g000000.0", "log", b"x")
    ledger.close()


def test_a_server_stopped_by_a_full_disk_keeps_what_it_confirmed(crowded, kit, monkeypatch):
    monkeypatch.setattr(postgres_module, "RECONNECT_S", 0.5)
    ledger, confirmed = Ledger(f"{crowded.url}#a-run", capacity=8), list[int]()
    ballast = fill(crowded.folder)

    def until_it_ends() -> None:
        for number in range(1000):
            ledger.remember("note", number)
            confirmed.append(number)
            with suppress(psycopg.Error), psycopg.connect(crowded.url, autocommit=True) as other:
                other.execute("SELECT pg_switch_wal()")  # other runs on this server use up its log

    with pytest.raises(StoreError, match="for the ledger's server") as caught:
        until_it_ends()
    assert "disk" in caught.value.hint
    ballast.unlink()
    crowded.start()
    assert ledger.recall("note") == confirmed[-1]
    ledger.admit(kit.spec("g000000.0"))
    ledger.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("left_bytes", [0, 300_000])
def test_a_run_whose_servers_disk_fills_up_ends_by_name_and_resumes_with_room(
    crowded, game, cli_in, tmp_path, left_bytes
):
    running = Running(cli_in(tmp_path), game.config).begin("rl.steps=40", f"experience.ledger={crowded.url}")
    try:
        running.at_step(2)
        ballast = fill(crowded.folder, left_bytes)
        assert running.end() not in (0, None)
        assert "Traceback" not in running.said, running.said
        assert "error: " in running.said
        assert "disk" in running.said.partition("hint: ")[2], running.said
        running.assert_nothing_left()
        ballast.unlink()
        if not crowded.runs:
            crowded.start()
        assert running.resume().end() == 0, running.said
        running.assert_sound()
    finally:
        running.stop()


def test_a_server_of_a_test_ends_with_the_process_that_started_it(tmp_path):
    script = """
import sys
from pathlib import Path
from tests.postgres_server import PostgresServer, programs
server = PostgresServer(Path(sys.argv[1]), programs())
print(server.pid, flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        assert len(family) > 1
        tests.kill()
    _, left = psutil.wait_procs(family, 120)
    assert not left


def refused(what: Callable[[], object], words: str, hint: str) -> None:
    with pytest.raises((LedgerError, StoreError), match=words) as caught:
        what()
    assert hint in caught.value.hint
    assert "a-password" not in str(caught.value)


def test_a_run_that_cannot_reach_its_ledger_server_is_refused_before_it_starts(postgres, place, monkeypatch):
    url = postgres.url
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("CREATE ROLE guest LOGIN PASSWORD 'a-password'")
        owner.execute("REVOKE CREATE ON DATABASE postgres FROM PUBLIC")
    guest = url.replace("postgres@", "guest@")
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = url.replace(str(postgres.port), str(free.getsockname()[1] ^ 1))
    check_server(url)
    refused(lambda: check_server(nobody), "does not answer", "start it")
    refused(lambda: check_server(guest), "may not create schemas", "GRANT CREATE ON DATABASE postgres TO guest")
    refused(lambda: Ledger(f"{guest}#a-run", capacity=1), "lacks permissions", "GRANT CREATE")
    refused(lambda: check_server(url.replace("/postgres", "/elsewhere")), "rejected the login", "PGPASSWORD")
    monkeypatch.setenv("PGPASSWORD", "not it")
    refused(lambda: check_server(url), "rejected the login", "PGPASSWORD")
