"""The arguments of ``etude eval`` that do not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.cli.evaluate import check_labels
from etude.errors import InputError


@pytest.mark.parametrize("labels", [["a b", "c", "a/b"], ["a-b", "a-b"]])
def test_labels_with_the_same_file_are_refused_with_the_characters_that_files_may_have(labels: list[str]) -> None:
    with pytest.raises(InputError, match="2 models have the same file for their results") as refused:
        check_labels(Path("evals"), "repair", labels)
    assert "a-b.json" in refused.value.facts
    assert "letters, digits, '@', '.', '_' and '-'" in refused.value.facts
    check_labels(Path("evals"), "repair", ["a b", "c", "a_b"])
