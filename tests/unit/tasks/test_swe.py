"""SWE-style rows: a repository, a commit, two patches and exact names become a task that proves itself."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.here import opened
from tests.unit.tasks.repositories import CALC, TEST_BOTH, git, shop
from tests.unit.tasks.test_mining_data import PYTEST, repository

from etude.environments import MachineGrader, NamespaceRuntime
from etude.errors import NoSource, TaskError
from etude.records.task import Runner, Split
from etude.tasks import check, open_source
from etude.tasks.swe import SweSource, exact_names

NAMES = ["test_percent (tests.test_calc.Discount)", "test_nothing_off (tests.test_calc.Discount)"]


def row(folder: Path, **changes: Any) -> dict[str, Any]:
    """A row about the shop's third commit; its repository is made where rows look for it."""
    place = folder / "repos" / "own__shop"
    ids = shop(place) if not place.exists() else git(place, "log", "--format=%H", "--reverse").split()
    diff = ("diff", ids[1], ids[2], "--")
    return {
        "instance_id": "own__shop-12",
        "repo": "own/shop",
        "base_commit": ids[1],
        "patch": git(place, *diff, "shop"),
        "test_patch": git(place, *diff, "tests"),
        "problem_statement": "Prices cannot be reduced by percent.",
        "FAIL_TO_PASS": json.dumps(NAMES),
        "PASS_TO_PASS": ["test_small (tests.test_calc.Add)"],
        "version": "1.0",
        "environment_setup_commit": ids[0],
        "hints_text": "not for agents",
        **changes,
    }


def source_of(folder: Path, *rows: dict[str, Any]) -> SweSource:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return SweSource(path)


def only(source: SweSource) -> tuple[Split, int]:
    [place] = [(split, index) for split in Split for index in range(source.size(split) or 0)]
    return place


def test_a_row_becomes_a_task_without_history_and_proves_itself(tmp_path: Path) -> None:
    source = source_of(tmp_path, row(tmp_path))
    split, index = only(source)
    task = source.task(split, index)
    assert task.instruction == "Prices cannot be reduced by percent."
    assert set(task.files) == {
        "README.md",
        "shop/__init__.py",
        "shop/calc.py",
        "tests/__init__.py",
        "tests/test_calc.py",
    }
    assert task.files["shop/calc.py"] == CALC
    assert task.exports == ("README.md", "shop/")
    assert task.family == "own/shop"
    answer = source.answer(task)
    assert set(answer.reference) == {"shop/calc.py"}
    assert answer.tests is not None
    assert answer.tests.runner is Runner.UNITTEST
    assert answer.tests.names == tuple(
        f"tests.test_calc.{name}" for name in ("Discount.test_percent", "Discount.test_nothing_off", "Add.test_small")
    )
    assert answer.tests.files == {"tests/test_calc.py": TEST_BOTH}

    async def proven() -> None:
        runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
        try:
            grader = MachineGrader(runtime, repeats=1, canaries=1)
            (await check(source, grader, split, deadline_s=600)).require()
        finally:
            await runtime.close()

    asyncio.run(proven())


@pytest.mark.parametrize("data", ["json_testcases", "examples"])
def test_data_that_tests_read_is_theirs_whichever_patch_brings_it(tmp_path: Path, data: str) -> None:
    place = tmp_path / "repos" / "own__quix"
    commit = repository(place, data=data, test=PYTEST, extra={"CHANGES.rst": "bits\n", "setup.cfg": "[metadata]\n"})
    diff = ("diff", f"{commit}~1", commit, "--")
    plain = {
        "instance_id": "own__quix-1",
        "repo": "own/quix",
        "base_commit": git(place, "rev-parse", f"{commit}~1").strip(),
        "patch": git(place, *diff, "programs", data, "CHANGES.rst", "setup.cfg"),
        "test_patch": git(place, *diff, "checks"),
        "problem_statement": "Bits are counted wrong.",
        "FAIL_TO_PASS": [f"checks/test_bitcount.py::test_bitcount[given{i}-{n}]" for i, n in enumerate((7, 1))],
    }
    source = source_of(tmp_path, plain)
    task = source.task(*only(source))
    answer = source.answer(task)
    assert set(answer.reference) == {"programs/bitcount.py", "CHANGES.rst"}
    assert answer.tests is not None
    assert set(answer.tests.files) == {"checks/test_bitcount.py", f"{data}/bitcount.json", "setup.cfg"}
    assert not [path for path in task.exports if path.startswith((f"{data}/b", "checks/loader", "setup.cfg"))]
    assert f"{data}/" not in task.exports
    assert "programs/" in task.exports


def test_repositories_are_found_beside_the_file_by_path_and_as_bundles(tmp_path: Path) -> None:
    plain = row(tmp_path)
    repository = tmp_path / "repos" / "own__shop"
    git(repository, "bundle", "create", "-q", str(tmp_path / "shop.bundle"), "--all")
    repository.rename(tmp_path / "elsewhere")
    for path in ("elsewhere", "shop.bundle"):
        source = source_of(tmp_path, {**plain, "repo_path": path})
        assert source.task(*only(source)).files["shop/calc.py"] == CALC
    source = source_of(tmp_path, plain)
    with pytest.raises(TaskError, match=r"own/shop does not exist(.|\n)*git clone --mirror"):
        source.task(*only(source))


@pytest.mark.parametrize("path", ["/etc", "../elsewhere", "repos/../../elsewhere", "."])
def test_a_row_names_no_repository_outside_of_its_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(TaskError, match="not a plain path relative to the folder of the file"):
        source_of(tmp_path, row(tmp_path, repo_path=path))


@pytest.mark.parametrize("key", ["problem_statement", "patch", "instance_id", "FAIL_TO_PASS"])
def test_a_row_with_a_lone_surrogate_is_refused(tmp_path: Path, key: str) -> None:
    half = ["tests.test_calc.Half.test_\ud800"] if key == "FAIL_TO_PASS" else "half \ud800"
    with pytest.raises(TaskError, match="not a SWE-style row"):
        source_of(tmp_path, row(tmp_path, **{key: half}))


def test_with_an_image_the_tree_is_in_the_image(tmp_path: Path) -> None:
    source = source_of(tmp_path, row(tmp_path, image={"digest": "ab12", "workdir": "/testbed"}))
    task = source.task(*only(source))
    assert task.files == {}
    assert task.image is not None
    assert task.image.workdir == "/testbed"
    assert "shop/" in task.exports


def test_a_row_is_read_packed_and_opened_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row(tmp_path)).encode()))
    source = open_source(f"swe:{path}", 0)
    assert sum(source.size(split) or 0 for split in Split) == 1
    with pytest.raises(NoSource, match="cannot read"):
        open_source(f"swe:{tmp_path}/none.jsonl", 0)


FORMS = {
    "tests/test_a.py::T::test_b[1-x]": (Runner.PYTEST, "tests/test_a.py::T::test_b[1-x]"),
    "test_b (pkg.tests.T)": (Runner.UNITTEST, "pkg.tests.T.test_b"),
    "test_b (pkg.tests.T.test_b)": (Runner.UNITTEST, "pkg.tests.T.test_b"),
    "pkg.tests.T.test_b": (Runner.UNITTEST, "pkg.tests.T.test_b"),
    "test_bare": (Runner.PYTEST, "sub/test_x.py::test_bare"),
}


@pytest.mark.parametrize("name", FORMS)
def test_names_are_read_in_every_known_form(name: str) -> None:
    runner, wanted = FORMS[name]
    assert exact_names([name], {"sub/test_x.py": "def test_bare():\n    pass\n"}, "row") == (runner, (wanted,))


@pytest.mark.parametrize("names", [["a.B.c", "x.py::y"], ["not found"], ["test_bare"], []])
def test_names_without_one_runner_or_one_place_are_refused(names: list[str]) -> None:
    with pytest.raises(TaskError, match="row: "):
        exact_names(names, {"a.py": "def test_bare(): 1\n", "b.py": "def test_bare(): 1\n"}, "row")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"base_commit": "--output=x"}, "not a commit id"),
    ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
    ({"FAIL_TO_PASS": "nonsense"}, "not a list"),
    ({"patch": 3}, "SWE-style row"),
    ({"test_deadline_s": 0}, "test_deadline_s"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        source_of(tmp_path, {**row(tmp_path), **change})


def test_patches_that_do_not_fit_and_solutions_that_touch_the_tests_are_refused(tmp_path: Path) -> None:
    good = row(tmp_path)
    for change in ({"patch": good["patch"].replace("return a + b", "return a")}, {"patch": good["test_patch"]}):
        source = source_of(tmp_path, {**good, **change})
        with pytest.raises(TaskError):
            source.task(*only(source))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_rows_are_task_errors(tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps({**dict.fromkeys(("instance_id", "repo", "base_commit", "patch", "test_patch"), "abcdef1"),
                       "problem_statement": "x", "FAIL_TO_PASS": ["a.b"]})  # fmt: skip
    at = data.draw(st.integers(0, len(text)))
    raw = text[:at].encode() + data.draw(st.binary(max_size=4)) + text[at + data.draw(st.integers(0, 3)) :].encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw)
    with suppress(TaskError):
        SweSource(path)
