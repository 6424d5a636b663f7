from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.small_rollouts import Kit, finishing

from etude.experience import Ledger


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite", capacity=8)
    yield opened
    opened.close()


@pytest.fixture
def finish_group(ledger: Ledger) -> Callable[[str, Sequence[float | None]], None]:
    return finishing(ledger)
