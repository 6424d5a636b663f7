"""A program for machines: run the tests of one file, and report each result and the files that were read.

Used by mining to find the tests of a repository. Grading uses another program.

stdin: JSON {"nonce", "runner", "path", "roots"}; `roots` are folders below the working directory in which modules are
found. stdout: lines of the nonce and one JSON value:

- ["test", name, "passed" or "failed"]: a skipped test counts as failed;
- ["error", last line of an error during test collection];
- ["missing", module];
- ["read", reading file, file], for files of the working directory that are not modules, once each;
- null at the end.

The output of the tests is discarded.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any

sys.dont_write_bytecode = True
Report = Any


def report_reads(report: Report) -> None:
    """Report from now on which files of the working directory are read by code in it, each pair of files once."""
    here, reported = os.path.realpath(os.getcwd()) + os.sep, set()
    writing = os.O_WRONLY | os.O_RDWR

    def inside(path: str) -> str | None:
        """The path relative to the working directory; None if it is outside."""
        whole = os.path.realpath(path)
        return whole[len(here) :] if whole.startswith(here) else None

    def reader() -> str | None:
        """The file of the innermost caller in the working directory."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.endswith(".py") and (found := inside(name)) is not None:
                return found
            frame = frame.f_back
        return None

    def hook(event: str, args: Any) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)) or args[2] & writing:
            return
        path = inside(os.fsdecode(args[0]))
        if path is None or path.endswith((".py", ".pyc")) or not os.path.isfile(path):
            return
        by = reader()
        if by is not None and (by, path) not in reported:
            reported.add((by, path))
            report("read", by, path)

    sys.addaudithook(hook)


def last_line(text: Any) -> str:
    """Return the last line of a text that is not empty."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip().lstrip("E ")[:200] if lines else ""


def with_unittest(path: str, report: Report) -> None:
    """Run the tests in the file `path` with unittest, and fill in the report."""

    class Result(unittest.TestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            super().startTest(test)
            self.failed = False

        def stopTest(self, test: unittest.TestCase) -> None:
            super().stopTest(test)
            if type(test).__module__.startswith("unittest"):
                return  # a placeholder for a file that cannot be imported
            report("test", test.id(), "failed" if self.failed else "passed")

        def _fail(self, *_: Any, **__: Any) -> None:
            self.failed = True

        addFailure = addSkip = addExpectedFailure = addUnexpectedSuccess = _fail

        def addError(self, test: Any, err: Any) -> None:
            self._fail()
            if type(test).__module__.startswith("unittest"):
                report("error", last_line(err[1]))

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self._fail()

    module = path[: -len(".py")].replace("/", ".")
    unittest.defaultTestLoader.loadTestsFromName(module).run(Result())


def with_pytest(path: str, report: Report) -> None:
    """Run the tests in the file `path` with pytest, and fill in the report."""
    import pytest

    send = report  # the hooks of pytest have an argument `report`

    class Reporter:
        def __init__(self) -> None:
            self.failed: set[str] = set()

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome != "passed" or hasattr(report, "wasxfail"):
                self.failed.add(report.nodeid)
            if report.when == "teardown":
                send("test", report.nodeid, "failed" if report.nodeid in self.failed else "passed")

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                send("error", last_line(report.longrepr))

    pytest.main([path, "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir=."], plugins=[Reporter()])


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    sys.path[:0] = [os.getcwd(), *(os.path.abspath(root) for root in request["roots"])]
    sys.argv = [request["path"]]

    def report(*what: str) -> None:
        out.write(f"{request['nonce']} {json.dumps(what or None)}\n")
        out.flush()

    run = with_pytest if request["runner"] == "pytest" else with_unittest
    report_reads(report)
    try:
        run(request["path"], report)
    except ModuleNotFoundError as error:
        report("missing", str(error.name))
    report()


if __name__ == "__main__":
    main()
