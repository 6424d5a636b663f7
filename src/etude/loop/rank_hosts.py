"""Learner ranks on other machines: the listener of rank 0, and the program that starts ranks.

    python -m etude.loop.rank_hosts --run RUN --count 4      (on each other machine, by hand, by Slurm, or by Ray)

Rank 0 opens a listener (`RankListener`) and writes its address and a new secret into the run folder, which all machines
mount. Whoever can read that file may provide ranks; others are refused. The program connects, states how many ranks it
provides, gets their numbers and the address of the learner's store, and starts them as children.

The connection stays open. When it ends, the ranks end on both sides, within `LINK_S` when a machine is lost or
disconnected. Then rank 0 exits with an error that names the rank, and its successor opens a new listener, to which the
same program connects again. The program exits when the run needs no learner any more.

This module does not load torch."""

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

CONNECT_S = 600.0
"""Seconds for all ranks to connect: a cluster needs minutes to provide a machine."""
LISTENER_S = 86_400.0
"""Seconds for a run to open a listener: it may be in mid-training, or stopped and resumed later."""
POLL_S, HANDSHAKE_S = 1.0, 10.0
_ADDRESS_FILE, _MAX_LINE, _MAX_UNAUTHENTICATED = "learner.address", 4096, 16
_SECRET_BYTES = 32
OnLost = Callable[[EtudeError, int | None], None]
"""Called with the error and the number of a rank that is lost."""


def start_rank(run: Path, rank: int, at: str, secret: bytes, *, local: int) -> subprocess.Popen[bytes]:
    """Start a learner rank as a child of this thread.

    `at` is the address of the learner's TCP store, `secret` is written to the rank's standard input, and `local` is the
    index of its device on this machine."""
    argv = [sys.executable, "-m", "etude.loop.rank_process", "--run", str(run), "--at", at, "--rank", str(rank)]
    env = {"OMP_NUM_THREADS": "1", **KEEP_MEMORY_ENV, **os.environ, "LOCAL_RANK": str(local)}  # as rank 0 has it
    started = subprocess.Popen(argv, stdin=subprocess.PIPE, env=env, preexec_fn=when_parent_dies)
    assert started.stdin is not None, "stdin=PIPE"
    with contextlib.suppress(BrokenPipeError):  # it has ended: its exit is reported
        started.stdin.write(secret)
        started.stdin.close()
    return started


def describe_exit(exit_code: int) -> str:
    """Return the exit code of a rank as text for an error."""
    return f"exit code {exit_code}{'; -9: out of memory, or killed by somebody' if exit_code == -9 else ''}"


@dataclass
class _RankHost:
    """A host process that has connected with some ranks. `ranks`: their numbers, once assigned."""

    host: str
    count: int
    nonce: str
    sock: socket.socket
    ranks: Sequence[int] = ()


class RankListener:
    """Rank 0's listener for `away` learner ranks on other machines. Its address `at` is HOST:PORT.

    `lost` is called in a background thread, with the error and the rank's number, when a connected rank is lost."""

    def __init__(self, run: Path, host: str, away: int, secret: bytes, lost: OnLost) -> None:
        """`away`: how many ranks must connect. Raises `RunError` when `host` is not an address of this machine."""
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
            raise RunError(f"cannot listen for ranks at {host}", str(error), hint=hint) from None
        self.at = format_address(*self._listener.getsockname()[:2])
        address = {"at": self.at, "secret": secret.hex()}
        write_durably(run / "logs" / _ADDRESS_FILE, json.dumps(address).encode(), mode=0o600)
        threading.Thread(target=self._accept, name="rank listener", daemon=True).start()

    def wait_for_ranks(self, first: int, at: str, waits: Callable[[str], object]) -> dict[int, str]:
        """Wait until the ranks from number `first` on have connected. Returns the host of each, by rank.

        They are sent `at`, the address of the learner's TCP store. `waits` is called with the reason for waiting
        whenever it changes. Raises `RunError` after `CONNECT_S` seconds."""
        end, last_reason = time.monotonic() + CONNECT_S, ""
        with self._changed:
            while (missing := self._away - sum(peer.count for peer in self._accepted())) > 0:
                reason = f"{missing} of {self._away} ranks have not connected to {self.at}{self._surplus()}"
                if reason != last_reason:
                    waits(last_reason := reason)
                if not self._changed.wait(end - time.monotonic()):
                    came = ", ".join(f"{peer.count} of {peer.host}" for peer in self._hosts) or "none"
                    raise RunError(
                        reason,
                        f"waited {CONNECT_S:g} s; connected: {came}",
                        hint=f"start them: python -m etude.loop.rank_hosts --run {self._run} --count {missing}",
                    )
            self._met = True
            hosts: dict[int, str] = {}
            for peer in sorted(self._accepted(), key=lambda peer: peer.host):  # neighbouring ranks share a host
                peer.ranks = range(first + len(hosts), first + len(hosts) + peer.count)
                hosts |= dict.fromkeys(peer.ranks, peer.host)
                with contextlib.suppress(OSError):  # reported by its thread
                    _send(peer.sock, _signed(self._secret, peer.nonce, {"ranks": list(peer.ranks), "store": at}))
        return hosts

    def _accepted(self) -> list[_RankHost]:
        """The hosts whose ranks are used, in order of connecting. Others wait for the next learner."""
        found: list[_RankHost] = []
        for peer in self._hosts:
            if sum(one.count for one in found) + peer.count <= self._away:
                found.append(peer)
        return found

    def _surplus(self) -> str:
        chosen = self._accepted()
        spare = [f"{peer.count} of {peer.host} are too many" for peer in self._hosts if peer not in chosen]
        parts = [*spare, self._refused] if self._refused else spare
        return f" ({'; '.join(parts)})" if parts else ""

    def _fits(self, peer: _RankHost) -> bool:
        """Whether a host's ranks may be needed, now or later. A host whose ranks are not needed now gets a message with
        the reason."""
        wanted = self._away - sum(one.count for one in self._accepted())
        if peer.count > self._away:
            self._refused = f"{_count_text(peer.count, self._away)}, from {peer.host}: refused"
            body: dict[str, Any] = {"refused": _count_text(peer.count, self._away), "wanted": self._away}
        elif self._met or peer.count > wanted:
            body = {"waits": f"{_count_text(peer.count, 0 if self._met else wanted)}; they wait for another learner"}
        else:
            return True
        with contextlib.suppress(OSError):  # reported by its thread
            _send(peer.sock, _signed(self._secret, peer.nonce, body))
        return "waits" in body

    def _accept(self) -> None:
        while True:
            self._unauthenticated.acquire()
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve_connection, args=(sock,), name="rank host", daemon=True).start()

    def _serve_connection(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines:
            try:
                peer = self._handshake(sock, lines)
            finally:
                self._unauthenticated.release()
            if peer is None:
                return
            with self._changed:
                fits = self._fits(peer)
                if fits:
                    self._hosts.append(peer)
                self._changed.notify_all()
            if not fits:
                return
            facts, rank = "its connection ended", None
            with contextlib.suppress(OSError, ValueError, KeyError):
                lost = json.loads(lines.readline(_MAX_LINE))
                facts, rank = describe_exit(int(lost["exit_code"])), int(lost["rank"])
            with self._changed:
                self._hosts.remove(peer)
            if peer.ranks:
                names = ", ".join(map(str, peer.ranks if rank is None else [rank]))
                hint = "check the output of etude.loop.rank_hosts there, and the network in between"
                error = EtudeError(f"rank {names} of the learner, on {peer.host}, ended", facts, hint=hint)
                self._lost(error, peer.ranks[0] if rank is None else rank)

    def _handshake(self, sock: socket.socket, lines: IO[bytes]) -> _RankHost | None:
        """Authenticate a connection; None when the peer does not have the secret. `HANDSHAKE_S` limits the full
        handshake, not each byte of it."""
        enable_keepalive(sock).settimeout(HANDSHAKE_S)
        nonce = secrets.token_hex(16)
        timed_out = threading.Event()
        late = threading.Timer(HANDSHAKE_S, _shut_down, (sock, timed_out))
        late.daemon = True
        late.start()
        try:
            _send(sock, {"nonce": nonce})
            body = _verified(self._secret, nonce, lines.readline(_MAX_LINE))
            late.cancel()
            if timed_out.is_set():
                return None
            sock.settimeout(None)
            return _RankHost(str(body["host"]), max(1, int(body["count"])), str(body["nonce"]), sock)
        except (OSError, ValueError, KeyError):
            return None
        finally:
            late.cancel()


def _shut_down(sock: socket.socket, timed_out: threading.Event) -> None:
    timed_out.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _count_text(connected: int, needed: int) -> str:
    noun, verb = "rank" if connected == 1 else "ranks", "is" if needed <= 1 else "are"
    return f"{connected} {noun} connected, {needed or 'none'} {verb} needed"


def serve_ranks(run: Path, count: int) -> None:
    """Provide `count` ranks to a run, for one learner after another, until the run needs no learner any more.

    Raises `RunError`, `NoRun`."""
    _wait_for_run(run)
    while (address := _next_listener(run)) is not None:
        at, secret = address
        with (
            contextlib.suppress(OSError, ValueError, KeyError),  # that learner is gone
            socket.create_connection(parse_address(at), timeout=HANDSHAKE_S) as link,
            enable_keepalive(link).makefile("rb") as lines,
        ):
            _serve(run, count, secret, link, lines)
        time.sleep(POLL_S)


def _wait_for_run(run: Path) -> None:
    """Wait until the run folder exists: this program may start before the run. Raises `NoRun`, `RunRefused`."""
    began, reported = time.monotonic(), False
    while not (run / "run.json").is_file():
        limit = HANDSHAKE_S if run.is_dir() and any(run.iterdir()) else CONNECT_S  # the folder has other files
        if time.monotonic() - began > limit:
            break
        if not reported:
            print(f"{run} is not a run yet: waiting up to {limit:g} s", flush=True)
            reported = True
        time.sleep(min(POLL_S, limit))
    RunFolder.open(run)


def _next_listener(run: Path) -> tuple[str, bytes] | None:
    """Wait for a listener; returns its (address, secret). None when the run needs no learner any more. Raises
    `RunError` after `LISTENER_S`."""
    end = time.monotonic() + LISTENER_S
    while True:
        try:
            if RunFolder(run).ended("eval-after"):
                return None
            address = json.loads((run / "logs" / _ADDRESS_FILE).read_text())
            return str(address["at"]), bytes.fromhex(address["secret"])
        except (OSError, ValueError, KeyError):
            if time.monotonic() > end:
                hint = "start a run with learner.ranks, fleet.ranks_away and fleet.ranks_at set"
                facts = f"waited {LISTENER_S:g} s for {run / 'logs' / _ADDRESS_FILE}"
                raise RunError("no learner waits for further processes (ranks)", facts, hint=hint) from None
        time.sleep(POLL_S)


def _serve(run: Path, count: int, secret: bytes, link: socket.socket, lines: IO[bytes]) -> None:
    """Run ranks of one learner until the learner or one of the ranks ends. Raises `OSError`, `ValueError`, `KeyError`,
    and `RunError` when the learner needs fewer ranks."""
    nonce = secrets.token_hex(16)
    host = f"{socket.gethostname()} ({link.getsockname()[0]})"
    peer_nonce = str(json.loads(lines.readline(_MAX_LINE))["nonce"])
    _send(link, _signed(secret, peer_nonce, {"nonce": nonce, "count": count, "host": host}))
    link.settimeout(CONNECT_S + LINK_S)
    reply = _verified(secret, nonce, lines.readline(_MAX_LINE))
    if "waits" in reply:
        print(reply["waits"], flush=True)
        reply = _verified(secret, nonce, lines.readline(_MAX_LINE))
    if "refused" in reply:
        hint = f"start at most as many as it needs: --count {reply['wanted']}"
        raise RunError(f"the learner of {run} refused these ranks", str(reply["refused"]), hint=hint)
    link.settimeout(None)
    print(f"ranks {reply['ranks']} of the learner at {reply['store']}", flush=True)
    ranks = {
        start_rank(run, int(rank), str(reply["store"]), secret, local=i): int(rank)
        for i, rank in enumerate(reply["ranks"])
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
    text = json.dumps(body)
    return {"text": text, "seal": sign(secret, f"{nonce} {text}".encode()).hex()}


def _verified(secret: bytes, nonce: str, line: bytes) -> dict[str, Any]:
    """Verify a signed message and return its body. Raises `ValueError`, `KeyError`."""
    try:
        message = json.loads(line)
        text, given = str(message["text"]), str(message["seal"])
    except (TypeError, RecursionError):
        raise ValueError("not a signed message") from None
    if not hmac.compare_digest(sign(secret, f"{nonce} {text}".encode()).hex().encode(), given.encode()):
        raise ValueError("wrong secret")
    body: dict[str, Any] = json.loads(text)
    return body


def sign(secret: bytes, data: bytes) -> bytes:
    """Return the HMAC-SHA256 of the data: 32 bytes."""
    return hmac.digest(secret, data, hashlib.sha256)


def new_secret() -> bytes:
    """Draw a new secret for the ranks of one learner process."""
    return secrets.token_bytes(_SECRET_BYTES)


def format_address(host: str, port: int) -> str:
    """Format an address as HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(at: str) -> tuple[str, int]:
    """Split "HOST:PORT" into host and port. Raises `ValueError`."""
    host, _, port = at.rpartition(":")
    return host.strip("[]"), int(port)


def address_family(host: str) -> socket.AddressFamily:
    """Return the address family (IPv4 or IPv6) of a numeric host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (1 or more)")
    return int(text)


def main() -> NoReturn:
    """Start ranks of a run's learner on this machine: the command line at the top of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m etude.loop.rank_hosts", description="Start ranks of a run's learner on this machine."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run folder, as this machine mounts it")
    parser.add_argument("--count", type=_count, default=1, help="number of ranks on this machine (1)")
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
