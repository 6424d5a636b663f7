"""A program for machines: runs the tests of one file, and reports each test's result as it ends and the files read.

It is used to find out which tests a repository has; grading has a runner of its own.

stdin: JSON {"nonce", "runner", "path", "roots"}; `roots` are folders below the working directory in which modules are
found. stdout: lines of the nonce and one JSON value:

- ["test", name, "passed" or "failed"]: a skipped test counts as failed;
- ["error", the last line of the error that kept tests from being found];
- ["missing", module];
- ["read", by which file, which file], for files of the working directory that are no modules, once each;
- null at the end.

What the tests print is dropped.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any

sys.dont_write_bytecode = True
Say = Any


def listen(say: Say) -> None:
    """Report from now on which files of the working directory are read by code in it. A file that does not exist is not
    reported."""
    here, said = os.path.realpath(os.getcwd()) + os.sep, set()
    reading = os.O_WRONLY | os.O_RDWR

    def inside(path: str) -> str | None:
        """A path relative to the working directory; None where it lies outside."""
        whole = os.path.realpath(path)
        return whole[len(here) :] if whole.startswith(here) else None

    def reader() -> str | None:
        """The nearest caller whose file lies in the working directory."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.endswith(".py") and (found := inside(name)) is not None:
                return found
            frame = frame.f_back
        return None

    def heard(event: str, args: Any) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)) or args[2] & reading:
            return
        path = inside(os.fsdecode(args[0]))
        if path is None or path.endswith((".py", ".pyc")) or not os.path.isfile(path):
            return
        by = reader()
        if by is not None and (by, path) not in said:
            said.add((by, path))
            say("read", by, path)

    sys.addaudithook(heard)


def last_line(text: Any) -> str:
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip().lstrip("E ")[:200] if lines else ""


def with_unittest(path: str, say: Say) -> None:
    class Result(unittest.TestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            super().startTest(test)
            self.bad = False

        def stopTest(self, test: unittest.TestCase) -> None:
            super().stopTest(test)
            if type(test).__module__.startswith("unittest"):
                return  # it stands for a file that does not import
            say("test", test.id(), "failed" if self.bad else "passed")

        def _worse(self) -> None:
            self.bad = True

        def addError(self, test: Any, err: Any) -> None:
            self._worse()
            if type(test).__module__.startswith("unittest"):
                say("error", last_line(err[1]))

        def addFailure(self, test: Any, err: Any) -> None:
            self._worse()

        def addSkip(self, test: Any, reason: str) -> None:
            self._worse()

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            self._worse()

        def addUnexpectedSuccess(self, test: Any) -> None:
            self._worse()

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self._worse()

    module = path[: -len(".py")].replace("/", ".")
    unittest.defaultTestLoader.loadTestsFromName(module).run(Result())


def with_pytest(path: str, say: Say) -> None:
    import pytest

    class Told:
        def __init__(self) -> None:
            self.bad: set[str] = set()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome != "passed" or hasattr(report, "wasxfail"):
                self.bad.add(report.nodeid)
            if report.when == "teardown":
                say("test", report.nodeid, "failed" if report.nodeid in self.bad else "passed")

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                say("error", last_line(report.longrepr))

    pytest.main([path, "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir=."], plugins=[Told()])


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    sys.path[:0] = [os.getcwd(), *(os.path.abspath(root) for root in request["roots"])]
    sys.argv = [request["path"]]

    def say(*what: str) -> None:
        out.write(f"{request['nonce']} {json.dumps(what or None)}\n")
        out.flush()

    run = with_pytest if request["runner"] == "pytest" else with_unittest
    listen(say)
    try:
        run(request["path"], say)
    except ModuleNotFoundError as error:
        say("missing", str(error.name))
    say()


if __name__ == "__main__":
    main()
