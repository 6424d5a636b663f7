"""The table of mutants fits the code and PROMISES.md: entries that no longer apply are found without running them."""

from __future__ import annotations

import pytest
from tests.mutants.table import ROOT, Mutant, mutants, promises

NAMED = {name for names in promises().values() for name in names}


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.test.rpartition("::")[2])
def test_a_mutant_applies_and_its_test_is_named_by_a_promise(mutant: Mutant) -> None:
    assert mutant.promised in NAMED
    for change in mutant.changes:
        assert change.applied((ROOT / change.file).read_text()) != (ROOT / change.file).read_text()
