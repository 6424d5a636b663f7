"""`etude weights key` where the library that draws keys is there, and where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etude.cli import main

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "stores.md"
INSTALL = "pip install 'etude[signing]'"


def test_without_the_library_no_key_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k.pem"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
        assert main(["weights", "key", str(file)]) == 1
    assert INSTALL in capsys.readouterr().err
    assert not file.exists()
    assert main(["weights", "key", str(file)]) == 0
    assert file.read_text().strip()


def test_the_guide_says_what_to_install_for_signatures() -> None:
    assert INSTALL in GUIDE.read_text()
