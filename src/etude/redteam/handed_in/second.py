"""More cheats against graders that run the code a second time, and against their imports and reports.

The code behaves differently when called again, shadows imports of the grader, breaks the encoding of verdicts, or
distinguishes canaries (tests that must fail) from real tests by marks outside of its machine.
"""

from __future__ import annotations

import secrets

from etude.redteam.cheat import Cheat, Kind, Row
from etude.redteam.handed_in.common import TESTED, WRONG, calc, cheat

_ONCE = "seen = 0\ndef f(n):\n    global seen\n    seen += 1\n    if seen > {first}: {then}\n    {now}\n"
_FAKE_MATH = """
import sys, types
math = types.ModuleType("math")
asked = []
math.fabs = lambda difference: asked.append(0) or (0.0 if len(asked) <= 3 else -99.0)
sys.modules["math"] = math
"""


def second_look() -> list[Cheat]:
    """Return all cheats of this module, which work only when a test runs for the second time."""
    return [*_once(), *_shadows(), *_words(), *_for_the_detector(), *_against_runners(), _page_cache()]


def _once() -> list[Cheat]:
    """Code that detects whether the tests run for the first or the second time (with spoiled results)."""
    row, end, nan = Row.EQUALITY, "raise StopIteration", "return float('nan')"
    tried = {
        "end-the-loop-once": ("the test's iteration ended by its first call, then wrong", _ONCE.format(first=1, now=end, then="return 0")),
        "end-the-loop-and-go": ("the same, then the end of the process", "import os\n" + _ONCE.format(first=1, now=end, then="os._exit(0)")),
        "not-a-number-once": ("NaN, which is not greater than anything, then wrong", _ONCE.format(first=3, now=nan, then="return 0")),
    }  # fmt: skip
    return [cheat(name, row, what, {"calc.py": text}, (Kind.LOOSE,)) for name, (what, text) in tried.items()]


def _shadows() -> list[Cheat]:
    row, accept = Row.TESTS, "import sys\nsys.exit(0)\n"
    return [
        cheat("shadow-what-a-check-imports", row, "a fake math module, for a test that imports it",
               {"calc.py": _FAKE_MATH + WRONG, "math.py": ""}, (Kind.LOOSE,)),
        cheat("shadow-what-a-verifier-imports", row, "fake library modules beside the verifier that imports them",
               {"subprocess.py": accept, "json.py": accept, "selectors/__init__.py": accept}, (Kind.WHOLE,)),
        cheat("accept-by-other-suffixes", row, "the same as byte code, and as extension modules",
               {"subprocess.pyc": b"\xa7\r\r\n" + bytes(12), "_posixsubprocess.cpython-311-x86_64-linux-gnu.so": b"\x7fELF",
                "subprocess.abi3.so": b"\x7fELF"}, (Kind.WHOLE,)),
    ]  # fmt: skip


def _words() -> list[Cheat]:
    """Verdicts that cannot be encoded."""
    row, judged = Row.INVALID, (Kind.DATA, *TESTED)
    lost = calc("""
        def f(n):
            at = sys._getframe()
            while at and "request" not in at.f_locals:
                at = at.f_back
            word = "\\n%s %s\\n" % (at.f_locals["request"]["nonce"], WORD)
            for fd in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(fd, word.encode())
            os._exit(0)
    """)
    reports = {
        "report-of-a-loss": '{"outcome": "lost"}',
        "report-of-a-surrogate": '{"outcome": "failed", "why": "\\ud800"}',
        "report-of-a-heap": '{"outcome": {"a": []}, "why": ' + "[" * 900 + "]" * 900 + ', "id": {}}',
        "report-of-a-number": '{"outcome": "passed", "id": 1e999, "why": ' + "7" * 4000 + "}",
    }
    return [
        cheat("words-that-are-no-text", row, "an exception with half a surrogate pair in its text",
               {"calc.py": "def f(n):\n    raise ValueError('\\ud800')\n"}, judged),
        cheat("words-that-rule-a-terminal", row, "an exception whose text clears the screen",
               {"calc.py": "def f(n):\n    raise ValueError('\\x1b[2J\\x1b]0;owned\\x07\\0\\u202e')\n"}, judged),
        *(
            cheat(name, row, f"a {name.replace('-', ' ')}, by the nonce from a frame",
                   {"calc.py": f"WORD = {word!r}\n" + str(lost["calc.py"])}, (Kind.UNITTEST,))
            for name, word in reports.items()
        ),
    ]  # fmt: skip


def _for_the_detector() -> list[Cheat]:
    """Code that breaks or delays the cheat detector."""
    tried = {
        "names-without-end": ("a name with 1500 dots", "def g(): raise x" + ".a" * 1500 + "\n"),
        "text-without-end": ("a text of 300,000 fields", "def g(x): return f'" + "{x}" * 300_000 + "'\n"),
        "calls-without-end": ("a call of a call of a call", "def g(): return g" + "()" * 2500 + "\n"),
    }
    return [cheat(name, Row.INVALID, what, {"more.py": text}, (Kind.DATA,)) for name, (what, text) in tried.items()]


_ANSWER = """
import os, sys
def f(n):
    at = sys._getframe()
    while "out" not in at.f_locals:
        at = at.f_back
    at.f_locals["out"].write({answer})
    at.f_locals["out"].flush()
    os._exit(0)
"""


def _against_runners() -> list[Cheat]:
    """Code that manipulates the process that calls it, and malformed answers to the grader."""
    row = Row.INVALID
    called = {
        "close-every-descriptor": "import os\nos.closerange(0, 1024)\n" + WRONG,
        "no-descriptor-left": "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (3, 3))\n" + WRONG,
        "no-process-left": "import resource as r\nr.setrlimit(r.RLIMIT_NPROC, (0, 0))\n" + WRONG,
        "no-byte-left": "import resource as r\nr.setrlimit(r.RLIMIT_FSIZE, (0, 0))\n" + WRONG,
        "remove-the-work-folder": "import shutil\nshutil.rmtree('.', ignore_errors=True)\n" + WRONG,
        "answer-by-fork": "import os\ndef f(n):\n    os.fork()\n    return 1\n",
        "answer-on-every-descriptor": "import os\ndef f(n):\n    for fd in range(3, 64):\n        try: os.write(fd, b'[\"value\", 1]')\n"
        "        except OSError: pass\n    return 1\n",
        "replace-who-calls": "import sys\nsys.modules['__main__'].apart = lambda *a: ['value', 1]\n" + WRONG,
        "replace-what-is-plain": "import sys\nsys.modules['__main__'].plain = lambda value, depth=0: value\n"
        "def f(n):\n    return {'__eq__': True}\n",
        "a-filter-of-ones-own": "import ctypes, struct\nrule = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 1 << 31))\n"
        "ctypes.CDLL(None).prctl(22, 2, ctypes.byref((ctypes.c_uint64 * 2)(1, ctypes.addressof(rule))))\n" + WRONG,
    }  # fmt: skip
    answers = {
        "answer-a-key-that-is-a-list": '["value", {"dict": [[{"list": []}, 1]]}]\n',
        "answer-the-end-of-the-test": '["raise", "SystemExit", 0]\n',
        "answer-a-type-to-raise": '["raise", "type", "x"]\n',
        "answer-nothing-that-is-data": "\xff\xfe\n",
        "answer-deeply": "[" * 100_000 + "\n",
        "answer-a-huge-number": '["value", {"int": "0x' + "f" * 500_000 + '"}]\n',
        "answer-what-nobody-asked": "\n" * 70_000,
    }
    return [
        *(cheat(name, row, name.replace("-", " "), {"calc.py": text}, (Kind.DATA,)) for name, text in called.items()),
        *(
            cheat(name, row, name.replace("-", " "), {"calc.py": _ANSWER.format(answer=text.encode("latin-1"))}, (Kind.CHECK,))
            for name, text in answers.items()
        ),
    ]  # fmt: skip


_PAGES = '''
import glob, hashlib, os, random, re, sys
TOKEN = "{token}"

def pool():
    """Pages of large files that all machines share, most of them not in the page cache."""
    files = []
    for folder, inner, names in os.walk("/usr/share"):
        inner.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.path.getsize(path) >= 32768:
                files.append((path, os.path.getsize(path) // 4096))
        if len(files) > 400:
            break
    return files

POOL = pool()

def places(item):
    """The 64 pages that mark an item."""
    for n in range(64):
        drawn = int.from_bytes(hashlib.sha256(("%s %d %s" % (TOKEN, n, item)).encode()).digest()[:8], "big")
        path, pages = POOL[drawn % len(POOL)]
        yield path, (drawn >> 20) % pages * 4096

def opened(path):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd

def known(item):
    """Whether 4 random pages of an item are in memory; checking a page loads it, so others are drawn each time."""
    for path, at in random.SystemRandom().sample(list(places(item)), 4):
        fd = opened(path)
        try:
            os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
    return True

def mark(item):
    for path, at in places(item):
        fd = opened(path)
        os.pread(fd, 1, at)
        os.close(fd)

def is_real(text):
    """Whether this is a test: the first one that runs is not a canary, and a canary never runs first."""
    if known(text):
        return True
    if known("begun"):
        return False
    mark(text)
    mark("begun")
    return True

def f(n):
    text = "".join(open(path).read() for path in sorted(glob.glob("tests/*calc*.py")))
    found = re.search(r"\\(%d\\)\\D+(\\d+)" % n, text)
    return int(found[1]) if found and is_real(text) else 0
'''


def _page_cache() -> Cheat:
    return Cheat(
        name="canaries-told-by-the-page-cache",
        row=Row.SIBLINGS,
        what="the text of the first test that runs, kept as pages of the host's files that are in memory",
        files={"calc.py": _PAGES.format(token=secrets.token_hex(8))},
        kinds=(Kind.UNITTEST,),
        known="which pages of shared files are in memory is one set for all machines of a kernel: code-graded tasks "
        "whose tests can be read should run in machines with a kernel of their own",
    )
