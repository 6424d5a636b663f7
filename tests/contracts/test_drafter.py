"""What an engine relies on in a drafter: the built-in one and the example."""

from __future__ import annotations

from typing import Any

from examples.plugins.drafters import Bigrams

from etude.inference.look_up import LookUp
from etude.testing.drafters import DrafterContract


class TestLookUp(DrafterContract):
    def make(self) -> Any:
        return LookUp()


class TestBigrams(DrafterContract):
    def make(self) -> Any:
        return Bigrams()
