"""The table of mutants fits the code and PROMISES.md: entries that no longer apply are found without running them."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants.results import KILLED, NOT_RUN, UNKNOWN, Result, Results, inputs_of, key_of, page
from tests.mutants.table import ROOT, Change, Mutant, mutants, promises

PROMISES = promises()
NAMED = {name for names in PROMISES.values() for name in names}


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.test.rpartition("::")[2])
def test_a_mutant_applies_and_its_test_is_named_by_a_promise(mutant: Mutant) -> None:
    assert mutant.promised in NAMED
    texts = {change.file: (ROOT / change.file).read_text() for change in mutant.changes}
    for change in mutant.changes:
        changed = change.applied(texts[change.file])
        assert changed != texts[change.file]
        texts[change.file] = changed
    for file, text in texts.items():
        if file.endswith(".py"):
            ast.parse(text)


def test_every_promise_has_at_least_one_mutant() -> None:
    broken = {mutant.promised for mutant in mutants()}
    assert [number for number, names in PROMISES.items() if not broken.intersection(names)] == []


def test_no_mutant_is_in_the_table_twice() -> None:
    assert [key for key, times in Counter(map(key_of, mutants())).items() if times > 1] == []


def test_a_result_is_believed_until_the_code_of_a_changed_file_or_of_the_tests_file_changes(tmp_path: Path) -> None:
    for name in ("code.py", "test_code.py"):
        (tmp_path / name).write_text("a = 1\n")
    mutant = Mutant("test_code.py::test_a", (Change("code.py", "1", "2"),))
    Results(tmp_path / "results.json").put(mutant, Result(mutant.test, KILLED, "", inputs_of(mutant, tmp_path)))
    again = Results(tmp_path / "results.json")
    assert again.of(mutant, tmp_path).found == KILLED
    assert again.of(replace(mutant, changes=(Change("code.py", "1", "3"),)), tmp_path).found == UNKNOWN
    for name in ("code.py", "test_code.py"):
        (tmp_path / name).write_text("a = 3\n")
        assert again.of(mutant, tmp_path).found == UNKNOWN
        (tmp_path / name).write_text('"""A head."""\n\na = 1  # a comment\n')
    assert again.of(mutant, tmp_path).found == KILLED
    again.keep([])
    assert Results(tmp_path / "results.json").of(mutant, tmp_path).found == UNKNOWN


def test_the_page_has_every_mutant_with_its_promises_and_the_reason_where_it_was_not_run(tmp_path: Path) -> None:
    mutant = next(one for one in mutants() if one.promised in PROMISES[1] and one.promised in PROMISES[139])
    table = [one for number, one in enumerate(mutants()) if one == mutant or number % 8 == 0]  # all take seconds
    results = Results(tmp_path / "results.json")
    assert page(table, results).count(f"| {UNKNOWN} |") == len(table)
    results.put(mutant, Result(mutant.test, NOT_RUN, "no QEMU | here", inputs_of(mutant, ROOT)))
    assert f"| 1, 139 | `{mutant.test}` | " in page(table, results)
    assert f"| {NOT_RUN}: no QEMU / here |" in page(table, results)
