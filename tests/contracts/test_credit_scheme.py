"""What every credit scheme promises. A new one joins with one line in SCHEMES_HERE."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from examples.plugins.credit import ByRank

from etude.experience import SCHEMES
from etude.records.reward import Reward
from etude.seams import CreditScheme
from etude.testing.rewards import CreditSchemeContract

SCHEMES_HERE: list[CreditScheme] = [*SCHEMES.values(), ByRank()]


class TestCreditScheme(CreditSchemeContract):
    @pytest.fixture(autouse=True, params=SCHEMES_HERE, ids=lambda scheme: scheme.name)
    def _take(self, request: pytest.FixtureRequest) -> None:
        self.scheme: CreditScheme = request.param

    def make(self) -> CreditScheme:
        assert isinstance(self.scheme, CreditScheme)
        return self.scheme


class _Scheme:
    """A scheme that breaks its contract."""

    name, version = "broken", "1"

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        self.calls += 1
        values = [reward.value for reward in rewards]
        match self.kind:
            case "fewer":
                return values[1:]
            case "nan":
                return [float("nan") for _ in values]
            case "negated":
                return [-value for value in values]
            case "by place":
                return [value + 0.1 * i for i, value in enumerate(values)]
            case "another each time":
                return [value * self.calls for value in values]
        raise ZeroDivisionError("no deviation")


@pytest.mark.parametrize("kind", ["fewer", "nan", "negated", "by place", "another each time", "raises"])
def test_a_scheme_that_breaks_a_promise_fails_a_test_of_the_suite(kind: str) -> None:
    suite = CreditSchemeContract()
    suite.make = lambda: _Scheme(kind)  # type: ignore[method-assign]
    broken = list[str]()
    for name in [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(suite, name)()
        except Exception as error:  # noqa: BLE001  whatever a test of the suite fails with
            broken.append(f"{name}: {error}")
    assert broken
