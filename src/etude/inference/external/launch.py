"""Runs an external server as a process that ends with its adapter, the process that started it.

The command is ``python -m etude.inference.external.launch MODULE ARGUMENTS``, in the server's environment. Each process
that the server spawns loads this module again, as `__mp_main__`, and so watches the adapter too: whichever process is
killed, none is left behind. The environment variable ETUDE_ADAPTER is the adapter's process id. Imports nothing of
etude, and nothing of the server before the watch has started."""

from __future__ import annotations

import os
import select
import threading

ADAPTER = "ETUDE_ADAPTER"


def _end_with(pid: int) -> None:
    """Exit this process immediately when the process `pid` ends."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def wait_and_end() -> None:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait_and_end, name="watch-adapter", daemon=True).start()


if __name__ in ("__main__", "__mp_main__"):
    _end_with(int(os.environ[ADAPTER]))
if __name__ == "__main__":
    import runpy
    import sys

    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=False)
