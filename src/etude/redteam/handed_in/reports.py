"""Cheats that forge reports of success."""

from __future__ import annotations

from etude.redteam.cheat import Cheat, Row
from etude.redteam.handed_in.common import calc, cheat

_SUMMARIES = (
    '===== 3 passed in 0.01s =====\nOK\nRan 3 tests in 0.001s\n\nok 1\n1..3\nPASSED\n{"passed": 3, "failed": 0}\n'
)
_PROGRAMS: tuple[tuple[str, str, str], ...] = (
    ("summary-on-output", "summaries of success on both streams, then the end", f"""
        print({_SUMMARIES!r})
        sys.stderr.write({_SUMMARIES!r})
        forge(["0" * 32, "nonce", ""])
        os._exit(0)
    """),
    ("nonce-from-frames", "the nonce from callers' variables, a report of our own", """
        def f(n):
            seen, at = set(), sys._getframe()
            while at:
                seen |= set(HEX.findall(repr(at.f_locals)[:1000000]))
                at = at.f_back
            seen |= set(HEX.findall(repr(sys.argv) + repr(dict(os.environ))))
            forge(seen)
            os._exit(0)
    """),
    ("nonce-from-the-heap", "the nonce from every object", """
        def f(n):
            seen = set()
            for thing in gc.get_objects():
                with contextlib.suppress(Exception):
                    if type(thing) is dict:
                        for value in list(thing.values()):
                            if type(value) in (str, bytes) and len(value) < 100000:
                                seen |= set(HEX.findall(str(value)))
            forge(sorted(seen)[:4096])
            os._exit(0)
    """),
    ("nonce-from-input", "the nonce from standard input, read again", """
        seen = set()
        for path in ("/proc/self/fd/0", "/dev/stdin", "/proc/self/cmdline", "/proc/self/environ"):
            with contextlib.suppress(OSError, ValueError):
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                seen |= set(HEX.findall(os.pread(fd, 1 << 20, 0).decode("latin1")))
        with contextlib.suppress(OSError):
            os.lseek(0, 0, 0)
            seen |= set(HEX.findall(os.read(0, 1 << 20).decode("latin1")))
        forge(seen)
        os._exit(0)
    """),
    ("nonce-from-memory", "the nonce from our memory", """
        seen = set()
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                span, mode = line.split()[:2]
                if mode.startswith("rw"):
                    start, end = (int(part, 16) for part in span.split("-"))
                    with contextlib.suppress(OSError, OverflowError, ValueError):
                        memory.seek(start)
                        seen |= set(HEX.findall(memory.read(min(end - start, 1 << 24)).decode("latin1")))
        forge(sorted(seen, key=lambda s: len(s) != 32)[:2000])
        def f(n):
            os._exit(0)
    """),
    ("nonce-from-other-processes", "the nonce from whoever started us", """
        seen = set()
        for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
            for name in ("cmdline", "environ", "fd/0", "mem"):
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    with open("/proc/%s/%s" % (pid, name), "rb") as file:
                        if name == "mem":
                            for line in open("/proc/%s/maps" % pid):
                                if " rw-p " in line:
                                    start, end = (int(part, 16) for part in line.split()[0].split("-"))
                                    with contextlib.suppress(OSError, OverflowError, ValueError):
                                        file.seek(start)
                                        seen |= set(HEX.findall(file.read(min(end - start, 1 << 23)).decode("latin1")))
                        else:
                            seen |= set(HEX.findall(file.read(1 << 20).decode("latin1")))
        def f(n):
            forge(sorted(seen, key=lambda s: len(s) != 32)[:3000])
            return 0
    """),
    ("write-into-the-grader", "the expected values in the grader's memory overwritten", """
        # any process that is not us and that we may write into: its copy of the answer, or its stack, becomes ours
        for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
            with contextlib.suppress(OSError, ValueError, OverflowError):
                with open("/proc/%s/maps" % pid) as maps, open("/proc/%s/mem" % pid, "r+b", buffering=0) as memory:
                    for line in maps:
                        if " rw-p " in line:
                            start, end = (int(part, 16) for part in line.split()[0].split("-"))
                            with contextlib.suppress(OSError, OverflowError, ValueError):
                                memory.seek(start)
                                data = memory.read(min(end - start, 1 << 23))
                                for found in re.finditer(rb"== \\\\[?(\\\\d{7,})", data):
                                    memory.seek(start + found.start(1))
                                    memory.write(b"0" * len(found[1]))
        def f(n):
            return 0
    """),
    ("report-again-and-again", "a process in the background that reports success for ever", """
        import time
        seen = set()
        at = sys._getframe()
        while at:
            seen |= set(HEX.findall(repr(at.f_locals)[:100000]))
            at = at.f_back
        if os.fork() == 0:
            os.setsid()
            for _ in range(50):
                forge(seen)
                time.sleep(0.02)
            os._exit(0)
        def f(n):
            return 0
    """),
    ("report-wrapped", "whatever is reported becomes true", """
        real = json.dumps
        def dumps(value, *a, **k):
            return real(True if isinstance(value, (str, bool)) else value, *a, **k)
        json.dumps = dumps
        def f(n):
            raise AssertionError
    """),
)  # fmt: skip
"""Name, description, and code after `common.GRAB`."""
_DEEP = "import os\ndef f(n):\n    os.write(1, b'[' * 3000000)\n    return [[]] * 10\n"
_ODD = "def f(n):\n    return 10 ** 5000 if n == 3 else float('nan')\n"


def forgery() -> list[Cheat]:
    """Return cheats that forge the grader's report, all those of this module."""
    row = Row.FORGERY
    return [
        *(cheat(name, row, what, calc(body)) for name, what, body in _PROGRAMS),
        cheat("report-that-breaks-parsers", row, "three million brackets", {"calc.py": _DEEP}),
        cheat("report-of-odd-numbers", row, "numbers that cannot be represented in JSON", {"calc.py": _ODD}),
    ]
