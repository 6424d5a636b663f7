"""The contract of a model family: the built-in ones, and the example plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.models.config import ModelFamily
from etude.models.family_lookup import FAMILY_NAMES, OWN_FAMILIES, family_of
from etude.testing.model_family import ModelFamilyContract, unknown_to_transformers

ROOT = Path(__file__).parents[2]
EXAMPLE = "model_family:AcmeMoe"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(ROOT / "examples" / "plugins")
    monkeypatch.setenv(OWN_FAMILIES, EXAMPLE)
    return EXAMPLE


@pytest.fixture(params=[*FAMILY_NAMES, EXAMPLE])
def family(request: pytest.FixtureRequest, example: str) -> ModelFamily:
    return family_of(request.param)


class TestModelFamily(ModelFamilyContract):
    @pytest.fixture(autouse=True)
    def _of(self, family: ModelFamily) -> None:
        self.family = family

    def make(self) -> ModelFamily:
        return type(self.family)()


def test_every_architecture_of_etude_is_compared_with_transformers() -> None:
    compared = {one.hf_class for one in map(family_of, FAMILY_NAMES) if not unknown_to_transformers(one)}
    assert compared == {family_of(name).hf_class for name in FAMILY_NAMES}


def test_the_guides_family_is_the_examples() -> None:
    guide = (ROOT / "docs" / "guides" / "your-checkpoint.md").read_text()
    example = (ROOT / "examples" / "plugins" / "model_family.py").read_text()
    assert example.partition('"""\n\n')[2].strip() in guide
