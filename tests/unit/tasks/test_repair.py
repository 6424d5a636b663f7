"""Generated repositories: their content, their splits, their tests as real scripts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.records.task import Split
from etude.tasks.repair import RepairSource
from etude.tasks.repair.functions import TEMPLATES, TRANSFER_TEMPLATES, VARIABLES, Body, Function, keys_in, split_of_key
from etude.testing import FakeGrader, run_python

KNOWN_SPLITS = {Split.TRAIN, Split.VALIDATION, Split.HELDOUT}


def _all_functions() -> list[Function]:
    return [
        Function("f", template, phrasing, variables, constant)
        for family, templates in [*TEMPLATES.items(), *TRANSFER_TEMPLATES.items()]
        for template in templates
        for phrasing in (0, 1)
        for variables in VARIABLES[family]
        for constant in (range(2, 20) if family == "ak" else [0])
    ]


def test_a_docstring_and_its_variables_determine_the_body() -> None:
    bodies: dict[str, str] = {}
    for function in _all_functions():
        assert bodies.setdefault(function.key, function.body.text) == function.body.text


def test_a_template_computes_what_its_instruction_says() -> None:
    samples = {"ab": [[7, 3], [2, 5], [4, 4]], "ak": [[0], [9], [30]], "xs": [[[3, 1, 2]]], "s": [[" aBc"]]}
    for function in _all_functions():
        for args in samples[function.template.family]:
            scope = dict(zip(function.variables, args, strict=True))
            assert eval(function.body.text, scope) == function.body.value(function.variables, args)


def test_every_family_is_in_every_split_and_train_has_four_fifths() -> None:
    functions = [f for f in _all_functions() if f.split is not Split.TRANSFER]
    shares = Counter(f.split for f in functions)
    assert {(f.template.family, f.split) for f in functions} == {(k, s) for k in TEMPLATES for s in KNOWN_SPLITS}
    assert 0.77 < shares[Split.TRAIN] / len(functions) < 0.83
    assert 0.08 < shares[Split.HELDOUT] / len(functions) < 0.12


def test_a_template_of_the_transfer_split_is_in_no_other_split_and_no_expression_or_phrase_is_in_both() -> None:
    known = [(f, t) for f, templates in TEMPLATES.items() for t in templates]
    apart = [(f, t) for f, templates in TRANSFER_TEMPLATES.items() for t in templates]
    for family, template in apart:
        assert template.expression not in {t.expression for f, t in known if f == family}
        assert not {(family, p) for p in template.phrases} & {(f, p) for f, t in known for p in t.phrases}
    source = RepairSource(seed=0)
    drawn = {split: {source.problem(split, i).function.template.expression for i in range(300)} for split in Split}
    for split in KNOWN_SPLITS:
        assert drawn[split] <= {t.expression for _, t in known}
    assert drawn[Split.TRANSFER] == {t.expression for _, t in apart}


def test_variants_of_one_broken_function_are_one_problem_and_differ_in_their_tasks() -> None:
    source = RepairSource(seed=0)
    tasks = [source.task(Split.HELDOUT, i) for i in range(512)]
    assert len({t.task_id for t in tasks}) > 500
    assert len({t.problem for t in tasks}) == 127


@pytest.mark.parametrize("split", Split)
def test_only_the_broken_function_belongs_to_the_split_and_the_others_train(split: Split) -> None:
    source = RepairSource(seed=1)
    for index in range(100):
        problem = source.problem(split, index)
        for functions in problem.modules.values():
            for function in functions:
                assert function.split is (split if function is problem.function else Split.TRAIN)


def test_a_task_shows_a_key_of_its_split_and_of_no_other_but_train() -> None:
    source = RepairSource(seed=1)
    for index in range(50):
        shown = [split_of_key(k) for text in source.task(Split.HELDOUT, index).files.values() for k in keys_in(text)]
        assert Counter(shown) == {Split.HELDOUT: 1, Split.TRAIN: 2}


def test_families_of_bugs_are_all_there() -> None:
    source = RepairSource(seed=0)
    kinds = {source.problem(Split.TRAIN, i).family for i in range(400)}
    assert kinds == {
        *("ab-operator", "ab-operands", "ab-missing", "ak-operator", "ak-constant", "ak-missing"),
        *("xs-call", "xs-missing", "s-call", "s-missing"),
    }


def test_the_first_heldout_task_of_seed_zero_is_the_one_it_always_was() -> None:
    assert RepairSource(seed=0).task(Split.HELDOUT, 0).task_id == "0162d68fa3da3188"


def test_another_seed_gives_other_tasks() -> None:
    first, second = RepairSource(seed=0), RepairSource(seed=1)
    assert first.task(Split.TRAIN, 0) != second.task(Split.TRAIN, 0)
    with pytest.raises(TaskError, match="the source has seed 1"):
        second.answer(first.task(Split.TRAIN, 0))


def test_visible_tests_fail_at_least_twice_before_the_fix_and_pass_after_it() -> None:
    source = RepairSource(seed=2)
    for index in range(60):
        task = source.task(Split.TRAIN, index)
        before = {path: text.encode() for path, text in task.files.items()}
        code, output = run_python(before, "tests.py")
        assert code == 1
        assert output.splitlines()[0].startswith(f"FAIL {source.problem(Split.TRAIN, index).module}.py ")
        assert output.splitlines()[1:] == ["2 of 4 passed"]
        after = before | {path: text.encode() for path, text in source.answer(task).reference.items()}
        assert run_python(after, "tests.py") == (0, "4 of 4 passed\n")


def test_the_script_runs_under_a_real_interpreter_and_sees_an_edit_of_the_same_length_at_once(tmp_path: Path) -> None:
    source = RepairSource(seed=0)
    problems = [source.problem(Split.TRAIN, i) for i in range(100)]
    index = next(i for i, p in enumerate(problems) if len(p.bug.body.text) == len(p.function.body.text))
    task = source.task(Split.TRAIN, index)
    for files, last in ((task.files, "2 of 4 passed"), (source.answer(task).reference, "4 of 4 passed")):
        for path, text in files.items():
            (tmp_path / path).write_text(text)
        done = subprocess.run(
            [sys.executable, "tests.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout.splitlines()[-1] == last
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(task.files)


@pytest.mark.parametrize(
    ("breakage", "shown"),
    [("def (:\n", "got SyntaxError"), ("raise KeyError(1)\n", "got KeyError"), ("", "got NameError")],
)
def test_a_module_that_does_not_import_is_a_failing_case_and_not_a_crash(breakage: str, shown: str) -> None:
    task = RepairSource(seed=0).task(Split.TRAIN, 0)
    files = {path: text.encode() for path, text in task.files.items()}
    code, output = run_python({**files, task.exports[0]: breakage.encode()}, "tests.py")
    assert code == 1
    assert shown in output.splitlines()[0]


def test_hidden_cases_tell_the_reference_from_the_bug_and_from_every_other_body_of_the_family() -> None:
    source = RepairSource(seed=5)
    for index in range(300):
        problem = source.problem(Split.HELDOUT, index)
        function = problem.function
        cases = [c for c in problem.hidden if c.function == function.name]
        assert len(cases) == 10
        other = [k for k in range(2, 20) if function.constant and k != function.constant]
        constants = [Body(function.template, (function.variables[0], k)) for k in other]
        for body in [problem.bug.body, *function.wrong_operators(), *function.wrong_operands(), *constants]:
            assert any(repr(body.value(function.variables, c.args)) != repr(c.expected) for c in cases)


def test_breaking_another_function_while_repairing_scores_nothing() -> None:
    source = RepairSource(seed=4)
    task = source.task(Split.TRAIN, 0)
    other = next(path for path in task.exports if path != f"{source.problem(Split.TRAIN, 0).module}.py")
    answer = source.answer(task)
    exports = {path: text.encode() for path, text in answer.reference.items()}
    signature = answer.reference[other].splitlines()[0]
    outcome = asyncio.run(
        FakeGrader().grade(task, answer, {**exports, other: f"{signature}\n    return ()\n".encode()})
    )
    assert outcome.grade == 0.0


def test_several_functions_a_file_are_supported_and_impossible_sizes_refused() -> None:
    source = RepairSource(seed=0, files=2, functions_per_file=2)
    problem = source.problem(Split.TRAIN, 3)
    assert [len(functions) for functions in problem.modules.values()] == [2, 2]
    with pytest.raises(TaskError, match="a repository of 3 files with 11 functions each"):
        RepairSource(seed=0, files=3, functions_per_file=11)
    with pytest.raises(TaskError, match="a repository of 0 files"):
        RepairSource(seed=0, files=0)
