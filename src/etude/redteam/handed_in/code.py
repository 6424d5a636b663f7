"""Cheats in the graded code: exits, skips, patched clocks, state between calls, and hanging graders."""

from __future__ import annotations

from etude.redteam.cheat import Cheat, Kind, Row
from etude.redteam.handed_in.common import WRONG, calc, cheat


def endings() -> list[Cheat]:
    """Return cheats whose code exits or skips, so that no test runs."""
    row, def_f = Row.ENDINGS, "def f(n):\n    "
    at_import = {
        "exit-at-import": ("sys.exit(0) when imported", "import sys\nsys.exit(0)\n"),
        "hard-exit-at-import": ("os._exit(0) when imported", "import os\nos._exit(0)\n"),
        "exit-in-the-call": ("SystemExit(0) from the function", f"{def_f}raise SystemExit(0)\n"),
        "hard-exit-in-the-call": ("os._exit(0) from the function", f"import os\n{def_f}os._exit(0)\n"),
        "interrupt": ("KeyboardInterrupt from the function", f"{def_f}raise KeyboardInterrupt\n"),
        "generator-exit": ("GeneratorExit from the function", f"{def_f}raise GeneratorExit\n"),
        "exit-at-exit": ("atexit that ends with 0", f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}"),
        "exit-in-a-thread": ("a thread that ends the process with 0 a moment later",
            f"import os, threading, time\nthreading.Timer(0.05, os._exit, (0,)).start()\n{def_f}time.sleep(5)\n"),
        "exit-by-signal": ("a timer signal whose handler exits with 0",
            f"import os, signal, time\nsignal.signal(14, lambda *_: os._exit(0))\nsignal.alarm(1)\n{def_f}time.sleep(9)\n"),
        "exit-by-exec": ("become `true`", 'import os\nos.execv("/bin/true", ["true"])\n'),
        "skip": ("unittest.SkipTest from the function", f"import unittest\n{def_f}raise unittest.SkipTest('no')\n"),
        "skip-at-import": ("unittest.SkipTest when imported", "import unittest\nraise unittest.SkipTest('no')\n"),
        "pytest-skip": ("pytest.skip from the function", f"import pytest\n{def_f}pytest.skip('no')\n"),
        "pytest-skip-module": ("pytest.skip for the module",
            "import pytest\npytest.skip('no', allow_module_level=True)\n"),
        "xfail": ("pytest.xfail from the function", f"import pytest\n{def_f}pytest.xfail('expected')\n"),
        "pytest-exit": ("pytest.exit with code 0", f"import pytest\n{def_f}pytest.exit('done', returncode=0)\n"),
    }  # fmt: skip
    return [cheat(name, row, what, {"calc.py": text}) for name, (what, text) in at_import.items()]


def clock() -> list[Cheat]:
    """Return cheats whose code stops clocks or ignores timers."""
    text = "import time\nreal = time.time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\ntime.sleep = lambda s: None\n"
    slow = "def f(n):\n    while True: pass\n"
    return [
        cheat("clock-stopped", Row.CLOCK, "every clock stands still, and the work never ends", {"calc.py": f"{text}{slow}"},
               (Kind.DATA, Kind.CHECK)),
        cheat("alarm-taken", Row.CLOCK, "signals of timers ignored, and the work never ends",
               {"calc.py": f"import signal\nfor s in (14, 15, 2): signal.signal(s, signal.SIG_IGN)\n{slow}"},
               (Kind.DATA, Kind.CHECK)),
    ]  # fmt: skip


def state() -> list[Cheat]:
    """Return cheats whose code keeps state between calls, or finds expected values outside of the call."""
    row = Row.STATE
    learn = calc("""
        import socket
        # what the last call was asked, left for the next one in every place that may outlive a process
        def places(n):
            return ["/tmp/s%d" % n, "/dev/shm/s%d" % n, "s%d" % n, os.path.expanduser("~/s%d" % n)]
        def f(n):
            for path in places(n):
                with contextlib.suppress(OSError, ValueError):
                    return int(open(path).read())
            at = sys._getframe(1)
            while at:
                for value in at.f_locals.values():
                    found = numbers(repr(value)[:10000], n)
                    if found:
                        for path in places(n):
                            with contextlib.suppress(OSError):
                                open(path, "w").write(str(found))
                at = at.f_back
            return 0
    """)
    descriptors = calc("""
        def f(n):
            for name in sorted(os.listdir("/proc/self/fd"), key=int):
                with contextlib.suppress(OSError, ValueError):
                    fd = os.open("/proc/self/fd/" + name, os.O_RDONLY | os.O_NONBLOCK)
                    found = numbers(os.pread(fd, 1 << 20, 0).decode("latin1"), n)
                    if found:
                        return found
            return 0
    """)
    return [
        cheat("state-in-files", row, "what one call learned, kept for the next", learn),
        cheat("answers-in-descriptors", row, "the expected value from any open descriptor", descriptors),
        cheat("canary-told-apart", row, "correct where the canary must be wrong, and the reverse", calc("""
            def f(n):
                at = sys._getframe(1)
                while at:
                    if at.f_locals.get("spoil") or at.f_locals.get("canary") or at.f_locals.get("change"):
                        return 1
                    at = at.f_back
                return 0
        """)),
    ]  # fmt: skip


def exhausting() -> list[Cheat]:
    """Return cheats whose code hangs, crashes or exhausts the grader."""
    row = Row.INVALID
    texts = {
        "grader-hang-at-import": "while True: pass\n",
        "grader-hang-in-the-call": "import time\ndef f(n):\n    while True: time.sleep(1)\n",
        "grader-memory": "x = []\nwhile True: x.append(bytearray(1 << 24))\n",
        "grader-fork-bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
        "grader-output": "import os\nwhile True: os.write(1, b'x' * 65536)\n",
        "grader-errors": "import sys\nwhile True: sys.stderr.write('x' * 65536)\n",
        "grader-kill-all": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
        "grader-kill-parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(1, signal.SIGKILL)\n",
        "grader-abort": "import os\nos.abort()\n",
        "grader-huge-value": "def f(n):\n    return 'x' * (1 << 26)\n",
        "grader-deep-value": "def f(n):\n    x = []\n    for _ in range(100000): x = [x]\n    return x\n",
        "grader-circular-value": "def f(n):\n    x = []\n    x.append(x)\n    return x\n",
        "grader-surrogates": "def f(n):\n    return '\\ud800' * 10\n",
        "grader-full-disk": "import os\ni = 0\ntry:\n    while True:\n        open(f'/tmp/x{i}', 'wb').write(bytes(1 << 20)); i += 1\n"
        "except OSError: pass\ntry:\n    while True:\n        open(f'x{i}', 'wb').write(bytes(1 << 20)); i += 1\nexcept OSError: pass\n"
        + WRONG,
        "grader-broken-code": 'MachineError = "the launcher is gone"\nimport os\nos.write(1, b"could not be confined")\nos._exit(125)\n',
        "grader-stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
        "grader-daemon-holds-output": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n"
        + WRONG,
        "grader-recursion": "def f(n):\n    return f(n)\n",
        "grader-bad-encoding": "# coding: etude-none\n" + WRONG,
    }
    tried = [
        cheat(name, row, f"{name.removeprefix('grader-').replace('-', ' ')} while being graded", {"calc.py": text},
               (Kind.DATA, Kind.CHECK))
        for name, text in texts.items()
    ]  # fmt: skip
    no_text: dict[str, str | bytes] = {"calc.py": b"\xff\xfe\0" * 100}
    return [*tried, cheat("grader-no-text", row, "exports that are not text", no_text, (Kind.DATA, Kind.CHECK))]
