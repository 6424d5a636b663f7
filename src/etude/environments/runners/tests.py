"""Collect hidden tests in a machine, or run one of them and report its outcome.

stdin: {"nonce", "role": "collect" | "run", "program": "pytest" | "unittest", "roots", ...}. stdout: one line, the nonce
and a report. "roots": folders to import from, beside the working directory.

For "collect", "names" lists the tests; the report is {"runner", "ids": {name without parameters: [ids in order]},
"errors"}. For "run", "base" and "index" select the test of that name; the report is {"id", "outcome", "why"}.

pytest is the machine's own, without its cache and the options of its configuration. Without pytest, plain functions and
unittest classes are run here; for other tests the report is {"needs": what is missing}. Also runs on older Pythons.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics

import sys

sys.path[:] = [path for path in sys.path if path]  # import from the machine's library, not from the agent's files

import importlib  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import unittest  # noqa: E402

OPTIONS = ["-q", "-o", "addopts=", "--rootdir=.", "--import-mode=prepend"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:random_order"]
PASSED = {"setup", "call", "teardown"}


class Needs(Exception):
    """Raised when the tests need something that this machine lacks, which is the argument."""


def find_modules(roots):
    """Put the working directory and the folders `roots` at the start of the import path."""
    sys.path[:0] = [os.getcwd()] + [os.path.abspath(root) for root in roots]


def last_line(text):
    """Return the last line that is not empty, at most 200 characters of it."""
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else ""


# ---- pytest


class Plugin:
    """A pytest plugin that records the collected tests and the reports. It runs the test with number `index`; None: it
    only collects."""

    def __init__(self, index, roots):
        self.index, self.roots, self.ids, self.reports, self.errors = index, roots, [], [], []

    def pytest_load_initial_conftests(self):
        find_modules(self.roots)  # like `python -m pytest`, but after plugins were loaded

    def pytest_collection_modifyitems(self, items):
        if self.index is not None:
            items[:] = items[self.index : self.index + 1]
        self.ids = [item.nodeid for item in items]
        if self.index is None:
            items[:] = []

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.append(last_line(report.longrepr))

    def pytest_runtest_logreport(self, report):
        outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
        self.reports.append((report.when, outcome, last_line(report.longrepr) if report.longrepr else ""))


def by_pytest(pytest, bases, index, roots):
    """Run pytest on the tests in `bases` and return the `Plugin` that recorded it. `index` None only collects."""
    plugin = Plugin(index, roots)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    code = pytest.main(OPTIONS + bases, plugins=[plugin])
    if not plugin.ids and not plugin.errors:
        plugin.errors.append(f"pytest ended with exit code {int(code)}")
    return plugin


def pytest_collect(pytest, names, roots):
    """Collect the tests `names` with pytest, and return the report of the role "collect"."""
    files = sorted({name.partition("::")[0] for name in names})
    plugin = by_pytest(pytest, [name for name in files if os.path.exists(name)], None, roots)
    ids: dict = {}
    for found in plugin.ids:
        ids.setdefault(found.partition("[")[0], []).append(found)
    return {"runner": "pytest " + pytest.__version__, "ids": ids, "errors": plugin.errors}


def pytest_run(pytest, base, index, roots):
    """Run test `index` of the name `base` with pytest, and return its report."""
    plugin = by_pytest(pytest, [base], index, roots)
    bad = [each for each in plugin.reports if each[1] != "passed"]
    if plugin.ids and not bad and {when for when, _, _ in plugin.reports} >= PASSED:
        return {"id": plugin.ids[0], "outcome": "passed", "why": ""}
    outcome = bad[0][1] if bad else "not run"
    why = bad[0][2] if bad else "; ".join(plugin.errors)
    return {"id": plugin.ids[0] if plugin.ids else "", "outcome": outcome, "why": why}


# ---- unittest, and what needs no pytest


def judge(test):
    """Run a unittest suite that has one test. Returns (outcome, reason)."""
    result = unittest.TestResult()
    test.run(result)
    bad = result.failures + result.errors
    odd = result.skipped + result.expectedFailures + [(each, "it was to fail") for each in result.unexpectedSuccesses]
    if bad or odd:
        return ("failed" if bad else "skipped"), last_line((bad + odd)[0][1])
    return ("passed", "") if result.testsRun == 1 else ("not run", f"{result.testsRun} tests ran")


def unittest_suite(name):
    """Return the only test of this dotted name. Raises `LookupError` if it names several tests."""
    suite = unittest.TestLoader().loadTestsFromName(name)
    tests = list(suite) if isinstance(suite, unittest.TestSuite) else [suite]
    if len(tests) != 1 or not isinstance(tests[0], unittest.TestCase):
        raise LookupError(f"{name} is {len(tests)} tests")
    return tests[0]


def unittest_collect(names):
    """Collect the tests `names` with unittest, and return the report of the role "collect"."""
    ids, errors = {}, []
    for name in names:
        try:
            test = unittest_suite(name)
            if type(test).__module__.startswith("unittest"):
                errors.append(last_line(judge(test)[1]))
            else:
                ids[name] = [test.id()]
        except Exception as error:  # noqa: BLE001 - whatever keeps it from being found
            errors.append(f"{type(error).__name__}: {error}")
    return {"runner": "unittest", "ids": ids, "errors": errors}


def unittest_run(base):
    """Run the test `base` with unittest, and return its report."""
    test = unittest_suite(base)
    outcome, why = judge(test)
    return {"id": test.id(), "outcome": outcome, "why": why}


def plain_test(name):
    """Return a unittest test case for a test with a pytest name that needs no pytest. Raises `Needs` if it needs
    pytest."""
    file, _, rest = name.partition("::")
    folder = os.path.dirname(os.path.abspath(file))
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(os.path.basename(file)[: -len(".py")])
    except ImportError as error:
        if error.name and error.name.partition(".")[0] in ("pytest", "_pytest"):
            raise Needs("pytest") from None
        raise
    owner, _, last = rest.rpartition("::")
    found = getattr(module, owner) if owner else module
    if inspect.isclass(found) and issubclass(found, unittest.TestCase):
        return found(last)
    function = getattr(found() if inspect.isclass(found) else found, last)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if "[" in rest or needed or inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise Needs("pytest")
    for at in (module, found):
        if any(hasattr(at, name) for name in ("setup_module", "setup_function", "setup_class", "setup_method")):
            raise Needs("pytest")
    return unittest.FunctionTestCase(function)


def plain_collect(names):
    """Collect the tests `names` without pytest, and return the report of the role "collect"."""
    ids, errors = {}, []
    for name in names:
        try:
            plain_test(name)
            ids[name] = [name]
        except Needs:
            raise
        except Exception as error:  # noqa: BLE001 - whatever keeps it from being found
            errors.append(f"{type(error).__name__}: {error}")
    return {"runner": "built-in", "ids": ids, "errors": errors}


def plain_run(base):
    """Run the test `base` without pytest, and return its report."""
    outcome, why = judge(plain_test(base))
    return {"id": base, "outcome": outcome, "why": why}


def import_pytest():
    """Import and return the machine's own pytest; None if it has none."""
    try:
        return importlib.import_module("pytest")
    except ImportError:
        return None


def answer(request):
    """Collect or run tests as the request says, and return the report."""
    collecting, roots = request["role"] == "collect", request["roots"]
    pytest = import_pytest() if request["program"] == "pytest" else None
    if pytest is not None:
        if collecting:
            return pytest_collect(pytest, request["names"], roots)
        return pytest_run(pytest, request["base"], request["index"], roots)
    find_modules(roots)
    if request["program"] == "unittest":
        return unittest_collect(request["names"]) if collecting else unittest_run(request["base"])
    return plain_collect(request["names"]) if collecting else plain_run(request["base"])


def main():
    request = json.load(sys.stdin)
    report_fd = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    try:
        report = answer(request)
    except Needs as error:
        report = {"needs": str(error)}
    except BaseException as error:  # noqa: BLE001 - however it ends, it was not passed
        report = {"id": "", "outcome": "failed", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    with os.fdopen(report_fd, "w") as file:
        file.write(f"\n{request['nonce']} {json.dumps(report)}\n")
        file.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
