"""A server of another make as a process that dies with its adapter: ``python -m etude.inference.external.launch MODULE
ARGUMENTS``.

Runs in the server's environment. Each process that it spawns from here loads this module anew, as `__mp_main__`, and so
watches the adapter, too: whichever of them is killed, nobody is left behind. ETUDE_ADAPTER in the environment is the
adapter's process id. Imports nothing of etude and, before it watches, nothing of the server.
"""

from __future__ import annotations

import os
import select
import threading

ADAPTER = "ETUDE_ADAPTER"


def _end_with(pid: int) -> None:
    """From now on this process ends when that one does, at once and without ceremony."""
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
