"""Ranks of a run's learner on other machines: the door at which they are met, and the program that brings them.

    python -m etude.loop.rank_hosts --run RUN --count 4      (on each other machine, by hand, by Slurm, or by Ray)

Rank 0 opens a door (`RankListener`) and writes where it is, with a secret of its own, into the run folder, which all machines
mount: who can read that file may bring ranks, others are refused. Who brings them says how many, is told which they are
and where the learner meets, and starts them as children. The connection stays: its end is the end of those ranks, on
both sides, and within `LINK_S` where a machine is gone or cut off. Then rank 0 ends, by name, and its successor opens
another door, to which the same program comes again. It leaves when the run needs no learner any more.

Nothing here loads torch, and nothing knows what ranks compute.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from etude.errors import EtudeError, RunError
from etude.inference.lifetime import when_parent_dies
from etude.loop.processes import KEEP_MEMORY_ENV
from etude.loop.rpc import LINK_S, enable_keepalive
from etude.run import RunFolder, write_durably

COME_S = 600.0
"""For all ranks to come: a cluster needs minutes to bring a machine."""
CALL_S = 86_400.0
"""For a run to open a door: it may be mid-training, or stopped and resumed."""
POLL_S, GREET_S = 1.0, 10.0
_ADDRESS_FILE, _MAX_LINE, _MAX_UNAUTHENTICATED = "learner.door", 4096, 16
_SECRET_BYTES = 32
OnLost = Callable[[EtudeError, int | None], None]
"""Is told that a rank is gone."""


def start_rank(run: Path, rank: int, at: str, secret: bytes, *, local: int) -> subprocess.Popen[bytes]:
    """A rank as a child of this process's thread. `at`: the store at which the learner meets; `local`: which of this
    machine's devices is its own."""
    argv = [sys.executable, "-m", "etude.loop.rank_process", "--run", str(run), "--at", at, "--rank", str(rank)]
    env = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY_ENV, **os.environ, "LOCAL_RANK": str(local)}  # as rank 0 has it
    started = subprocess.Popen(argv, stdin=subprocess.PIPE, env=env, preexec_fn=when_parent_dies)
    assert started.stdin is not None, "it was asked for"
    with contextlib.suppress(BrokenPipeError):  # it has ended: its exit tells
        started.stdin.write(secret)
        started.stdin.close()
    return started


def describe_exit(exit_code: int) -> str:
    """An exit code of a rank, in words."""
    return f"exit code {exit_code}{'; -9 is out of memory, or somebody killed it' if exit_code == -9 else ''}"


@dataclass
class _RankHost:
    """A host process that has connected with some ranks. `ranks`: their numbers, once they are known."""

    host: str
    count: int
    nonce: str
    sock: socket.socket
    ranks: Sequence[int] = ()


class RankListener:
    """Rank 0's side: accepts ranks of other machines. `lost` is called, in a thread, when a connected rank is lost."""

    def __init__(self, run: Path, host: str, away: int, secret: bytes, lost: OnLost) -> None:
        """`away`: how many ranks must connect. Raises `RunError` where `host` is no address of this machine."""
        self._run, self._away, self._secret, self._lost = run, away, secret, lost
        self._hosts: list[_RankHost] = []
        self._refused = ""
        self._met = False
        self._changed = threading.Condition()
        self._unauthenticated = threading.BoundedSemaphore(_MAX_UNAUTHENTICATED)
        try:
            self._listener = socket.create_server((host, 0), family=address_family(host))
        except OSError as error:
            hint = "set fleet.ranks_at to the address of this machine that the machines of the other ranks can reach"
            raise RunError(f"ranks on other machines cannot be met at {host}", str(error), hint=hint) from None
        self.at = format_address(*self._listener.getsockname()[:2])
        door = {"at": self.at, "secret": secret.hex()}
        write_durably(run / "logs" / _ADDRESS_FILE, json.dumps(door).encode(), mode=0o600)
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def wait_for_ranks(self, first: int, at: str, waits: Callable[[str], object]) -> dict[int, str]:
        """Wait until the ranks from number `first` on have connected, and send them the address `at` of the learner's
        store. Returns the host of each rank. `waits` is called with the reason for waiting whenever that changes.
        Raises `RunError` after `COME_S`."""
        end, told = time.monotonic() + COME_S, ""
        with self._changed:
            while (missing := self._away - sum(guest.count for guest in self._accepted())) > 0:
                reason = f"{missing} of {self._away} ranks have not connected to {self.at}{self._surplus()}"
                if reason != told:
                    waits(told := reason)
                if not self._changed.wait(end - time.monotonic()):
                    came = ", ".join(f"{guest.count} of {guest.host}" for guest in self._hosts) or "none"
                    raise RunError(
                        reason,
                        f"waited {COME_S:g} s; connected: {came}",
                        hint=f"start them: python -m etude.loop.rank_hosts --run {self._run} --count {missing}",
                    )
            self._met = True
            hosts: dict[int, str] = {}
            for guest in sorted(self._accepted(), key=lambda guest: guest.host):  # so neighbours share one
                guest.ranks = range(first + len(hosts), first + len(hosts) + guest.count)
                hosts |= dict.fromkeys(guest.ranks, guest.host)
                with contextlib.suppress(OSError):  # its thread tells
                    _send(guest.sock, _signed(self._secret, guest.nonce, {"ranks": list(guest.ranks), "store": at}))
        return hosts

    def _accepted(self) -> list[_RankHost]:
        """The hosts whose ranks are taken, in order of connecting; others wait for another learner."""
        found: list[_RankHost] = []
        for guest in self._hosts:
            if sum(one.count for one in found) + guest.count <= self._away:
                found.append(guest)
        return found

    def _surplus(self) -> str:
        """The hosts whose ranks are too many, in words for the error."""
        chosen = self._accepted()
        spare = [f"{guest.count} of {guest.host} are too many" for guest in self._hosts if guest not in chosen]
        told = [*spare, self._refused] if self._refused else spare
        return f" ({'; '.join(told)})" if told else ""

    def _fits(self, guest: _RankHost) -> bool:
        """Whether a host's ranks may fit, now or later. A host that does not fit now gets a message with the reason."""
        wanted = self._away - sum(one.count for one in self._accepted())
        if guest.count > self._away:
            self._refused = f"{_ranks_came(guest.count, self._away)}, from {guest.host}: sent back"
            body: dict[str, Any] = {"refused": _ranks_came(guest.count, self._away), "wanted": self._away}
        elif self._met or guest.count > wanted:
            body = {"waits": f"{_ranks_came(guest.count, 0 if self._met else wanted)}; they wait for another learner"}
        else:
            return True
        with contextlib.suppress(OSError):  # its thread tells
            _send(guest.sock, _signed(self._secret, guest.nonce, body))
        return "waits" in body

    def _accept(self) -> None:
        while True:
            self._unauthenticated.acquire()
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve_connection, args=(sock,), name="guest", daemon=True).start()

    def _serve_connection(self, sock: socket.socket) -> None:
        """Serve one connection to its end."""
        with sock, sock.makefile("rb") as lines:
            try:
                guest = self._handshake(sock, lines)
            finally:
                self._unauthenticated.release()
            if guest is None:
                return
            with self._changed:
                fits = self._fits(guest)
                if fits:
                    self._hosts.append(guest)
                self._changed.notify_all()
            if not fits:
                return
            facts, rank = "its connection ended", None
            with contextlib.suppress(OSError, ValueError, KeyError):
                lost = json.loads(lines.readline(_MAX_LINE))
                facts, rank = describe_exit(int(lost["exit_code"])), int(lost["rank"])
            with self._changed:
                self._hosts.remove(guest)
            if guest.ranks:
                names = ", ".join(map(str, guest.ranks if rank is None else [rank]))
                hint = "see the output of etude.loop.rank_hosts there, and the network between"
                error = EtudeError(f"rank {names} of the learner, on {guest.host}, ended", facts, hint=hint)
                self._lost(error, guest.ranks[0] if rank is None else rank)

    def _handshake(self, sock: socket.socket, lines: IO[bytes]) -> _RankHost | None:
        """Who connected, where it has the secret. It has so long for all that it says, not for each byte of it."""
        enable_keepalive(sock).settimeout(GREET_S)
        nonce = secrets.token_hex(16)
        hung_up = threading.Event()
        late = threading.Timer(GREET_S, _hang_up, (sock, hung_up))
        late.daemon = True
        late.start()
        try:
            _send(sock, {"nonce": nonce})
            said = _verified(self._secret, nonce, lines.readline(_MAX_LINE))
            late.cancel()
            if hung_up.is_set():
                return None
            sock.settimeout(None)
            return _RankHost(str(said["host"]), max(1, int(said["count"])), str(said["nonce"]), sock)
        except (OSError, ValueError, KeyError):
            return None
        finally:
            late.cancel()


def _hang_up(sock: socket.socket, hung_up: threading.Event) -> None:
    hung_up.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _ranks_came(came: int, wanted: int) -> str:
    """In words."""
    return f"{came} rank{'s' if came > 1 else ''} came, {wanted or 'none'} {'is' if wanted <= 1 else 'are'} wanted"


def serve_ranks(run: Path, count: int) -> None:
    """Bring ranks to a run, one learner after another, until it needs none any more. Raises `RunError`, `NoRun`."""
    _wait_for_run(run)
    while (door := _next_listener(run)) is not None:
        at, secret = door
        with (
            contextlib.suppress(OSError, ValueError, KeyError),  # that learner is gone, or was never there
            socket.create_connection(parse_address(at), timeout=GREET_S) as link,
            enable_keepalive(link).makefile("rb") as lines,
        ):
            _serve(run, count, secret, link, lines)
        time.sleep(POLL_S)


def _wait_for_run(run: Path) -> None:
    """Whoever brings ranks may come before the run is made, and is told so. Raises `NoRun`, `RunRefused`."""
    began, told = time.monotonic(), False
    while not (run / "run.json").is_file():
        limit = GREET_S if run.is_dir() and any(run.iterdir()) else COME_S  # something else is there
        if time.monotonic() - began > limit:
            break
        if not told:
            print(f"{run} is not a run: waits {limit:g} s for one to be made there", flush=True)
            told = True
        time.sleep(min(POLL_S, limit))
    RunFolder.open(run)


def _next_listener(run: Path) -> tuple[str, bytes] | None:
    """(address, secret) of the door that was opened last; None: the run is done with learners."""
    end = time.monotonic() + CALL_S
    while True:
        try:
            if RunFolder(run).ended("eval-after"):
                return None
            door = json.loads((run / "logs" / _ADDRESS_FILE).read_text())
            return str(door["at"]), bytes.fromhex(door["secret"])
        except (OSError, ValueError, KeyError):
            if time.monotonic() > end:
                hint = "start a run with learner.ranks, fleet.ranks_away and fleet.ranks_at set"
                facts = f"waited {CALL_S:g} s for {run / 'logs' / _ADDRESS_FILE}"
                raise RunError("no learner asks for ranks", facts, hint=hint) from None
        time.sleep(POLL_S)


def _serve(run: Path, count: int, secret: bytes, link: socket.socket, lines: IO[bytes]) -> None:
    """One learner's ranks, until it or one of them ends. Raises `OSError`, `ValueError`, `KeyError`, and `RunError`
    where they are more than it asks for."""
    nonce = secrets.token_hex(16)
    host = f"{socket.gethostname()} ({link.getsockname()[0]})"
    theirs = str(json.loads(lines.readline(_MAX_LINE))["nonce"])
    _send(link, _signed(secret, theirs, {"nonce": nonce, "count": count, "host": host}))
    link.settimeout(COME_S + LINK_S)
    told = _verified(secret, nonce, lines.readline(_MAX_LINE))
    if "waits" in told:
        print(told["waits"], flush=True)
        told = _verified(secret, nonce, lines.readline(_MAX_LINE))
    if "refused" in told:
        hint = f"bring at most what it asks for: --count {told['wanted']}"
        raise RunError(f"the learner of {run} sends its ranks back", str(told["refused"]), hint=hint)
    link.settimeout(None)
    print(f"ranks {told['ranks']} of the learner that meets at {told['store']}", flush=True)
    ranks = {
        start_rank(run, int(rank), str(told["store"]), secret, local=i): int(rank)
        for i, rank in enumerate(told["ranks"])
    }
    try:
        with selectors.DefaultSelector() as watched, contextlib.ExitStack() as stack:
            watched.register(link, selectors.EVENT_READ)
            for process in ranks:
                end = stack.enter_context(os.fdopen(os.pidfd_open(process.pid), "rb", buffering=0))
                watched.register(end, selectors.EVENT_READ, process)
            ended = [key.data for key, _ in watched.select() if key.data is not None]
        for process in ended[:1]:
            print(f"rank {ranks[process]} ended: {describe_exit(process.wait())}", flush=True)
            _send(link, {"rank": ranks[process], "exit_code": process.wait()})
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _send(sock: socket.socket, body: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(body).encode() + b"\n")


def _signed(secret: bytes, nonce: str, body: Mapping[str, Any]) -> dict[str, str]:
    """What only who has the secret can say to who gave the nonce."""
    text = json.dumps(body)
    return {"text": text, "seal": sign(secret, f"{nonce} {text}".encode()).hex()}


def _verified(secret: bytes, nonce: str, line: bytes) -> dict[str, Any]:
    """Raises `ValueError`, `KeyError`."""
    try:
        said = json.loads(line)
        text, given = str(said["text"]), str(said["seal"])
    except (TypeError, RecursionError):
        raise ValueError("nothing that is sealed") from None
    if not hmac.compare_digest(sign(secret, f"{nonce} {text}".encode()).hex().encode(), given.encode()):
        raise ValueError("not the secret")
    body: dict[str, Any] = json.loads(text)
    return body


def sign(secret: bytes, data: bytes) -> bytes:
    """[32] What shows that who says something has the secret."""
    return hmac.digest(secret, data, hashlib.sha256)


def new_secret() -> bytes:
    """Of one learner."""
    return secrets.token_bytes(_SECRET_BYTES)


def format_address(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(at: str) -> tuple[str, int]:
    """Of HOST:PORT. Raises `ValueError`."""
    host, _, port = at.rpartition(":")
    return host.strip("[]"), int(port)


def address_family(host: str) -> socket.AddressFamily:
    """Of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: 1 or more")
    return int(text)


def main() -> NoReturn:
    """Bring ranks: see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m etude.loop.rank_hosts", description="Bring ranks to a run's learner."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run folder, as this machine mounts it")
    parser.add_argument("--count", type=_count, default=1, help="ranks of this machine (1)")
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: sys.exit(130))
    print(f"{args.count} ranks wait for the learner of {args.run.absolute()}", flush=True)
    try:
        serve_ranks(args.run.absolute(), args.count)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(int(error.exit_code))
    sys.exit(0)


if __name__ == "__main__":
    main()
