"""Our server of machines as a process of its own, for benchmarks that are its clients."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etude.errors import MachineError


@contextlib.contextmanager
def served(keys_toml: str) -> Iterator[str]:
    """Its URL on loopback, while the block runs; who may do what is said as in a keys file. `MachineError` where it
    does not start."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.touch(0o600)
        keys.write_text(keys_toml)
        command = [sys.executable, "-m", "etude.cli", "machines", "serve", "--port", "0", "--keys", str(keys)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                line = server.stdout.readline()
                if not line:
                    raise MachineError("the server of machines did not start", hint="see what it printed")
                yield line.split()[-1]
            finally:
                server.terminate()
