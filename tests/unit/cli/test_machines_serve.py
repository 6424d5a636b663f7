"""``etude machines serve``: what it refuses before it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.cli import main
from etude.errors import Exit

GOOD = '[me]\nkey = "e2b_0123456789abcdef"\n'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0"], "reachable from the network"),
        (["--host", "machines.example"], "reachable from the network"),
        (["--keys", "absent.toml"], "not a valid file of keys"),
        (["--keys", "keys.toml", "--templates", "absent.toml"], "not a valid file of templates"),
        (["--backend", "nowhere"], "no backend 'nowhere'"),
        (["--backend", "remote"], "the service of the remote machines is not configured"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_hint(options, said, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("E2B_API_KEY", "E2B_API_URL", "E2B_DOMAIN"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "keys.toml"
    keys.write_text(GOOD)
    keys.chmod(0o600)
    assert main(["machines", "serve", "--port", "0", *options]) in (Exit.BAD_INPUT, Exit.FAILED)
    err = capsys.readouterr().err
    assert said in err
    assert "hint: " in err
