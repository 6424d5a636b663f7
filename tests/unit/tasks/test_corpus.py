"""Documents for mid-training, and the proof that nothing held out is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import TaskError
from etude.records.task import Split
from etude.tasks import RepairSource, assert_no_heldout, code_documents, library_documents
from etude.tasks.repair.functions import keys_in, split_of_key
from etude.tasks.scripts import demonstrations


def test_code_documents_are_seeded_compile_and_hold_no_heldout_function() -> None:
    texts = list(code_documents(count=600, seed=0))
    assert texts == list(code_documents(count=600, seed=0)) != list(code_documents(count=600, seed=1))
    for text in texts:
        compile(text, "document", "exec")
    assert assert_no_heldout(texts) == sum(text.count("def ") for text in texts) > 600


def test_two_thirds_of_the_code_documents_know_constants_beyond_the_repositories() -> None:
    texts = list(code_documents(count=600, seed=0))
    wide = [any(any(w.isdigit() and int(w) > 19 for w in k.split()) for k in keys_in(t)) for t in texts]
    assert not any(wide[::3])
    assert sum(wide) > 100


@pytest.mark.parametrize("split", [Split.HELDOUT, Split.TRANSFER])
def test_the_check_finds_a_heldout_function_in_code_and_in_what_an_agent_saw(split: Split) -> None:
    problem = RepairSource(seed=0).problem(split, 0)
    code = problem.files()[f"{problem.module}.py"]
    seen = "\n".join(f"{n} {line.replace('    ', ' ')}" for n, line in enumerate(code.splitlines(), start=1))
    for text in (code, f"<tool>{seen}<end>"):
        with pytest.raises(TaskError, match=f"the corpus has a {split} function, which must not be trained on"):
            assert_no_heldout(["nothing here", text])


def test_every_generated_function_is_recognised_by_the_check() -> None:
    source = RepairSource(seed=0)
    for split in Split:
        for index in range(200):
            function = source.problem(split, index).function
            assert list(keys_in(function.source())) == [function.key]
            assert split_of_key(function.key) is split


def test_what_demonstrations_show_is_training_functions_only() -> None:
    texts = [t for d in demonstrations(RepairSource(seed=0), count=100, seed=0) for t in d.task.files.values()]
    assert assert_no_heldout(texts) == 300


def test_library_documents_are_real_code_within_the_budget_and_seeded() -> None:
    texts = list(library_documents(budget_chars=30_000, seed=0, piece_chars=1_000))
    assert 25_000 < sum(map(len, texts)) <= 30_000
    assert max(map(len, texts)) <= 1_000
    assert all(text.isascii() for text in texts)
    assert texts == list(library_documents(budget_chars=30_000, seed=0, piece_chars=1_000))
    assert texts != list(library_documents(budget_chars=30_000, seed=1, piece_chars=1_000))
    assert_no_heldout(texts)


def test_other_peoples_docstrings_are_no_functions_of_ours() -> None:
    assert assert_no_heldout([f'def go(x{i}):\n    """Return the x{i} of the thing."""\n' for i in range(200)]) == 0


def test_library_pieces_end_with_lines_and_nothing_is_said_twice(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("".join(f"x{i} = {i}\n" for i in range(100)))
    (tmp_path / "b.py").write_text("# é\n")
    texts = list(library_documents(budget_chars=10_000, seed=0, piece_chars=120, root=tmp_path))
    assert "".join(texts) == (tmp_path / "a.py").read_text()
    assert all(text.endswith("\n") for text in texts)


def test_no_library_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="library_chars = 0"):
        list(library_documents(budget_chars=100, seed=0, root=tmp_path))
    assert list(library_documents(budget_chars=0, seed=0)) == []
