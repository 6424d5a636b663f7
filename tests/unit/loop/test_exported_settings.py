"""The file etude.json of an exported checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.capture import SummaryLimits
from etude.config import to_toml
from etude.errors import CheckpointError
from etude.file_checksums import write_sums
from etude.loop.config import RunConfig
from etude.loop.exported_settings import FILE, settings_files, summaries_of_checkpoint, summaries_of_run
from etude.loop.serving import parts_of
from etude.run import RunFolder

LIMITS = SummaryLimits(context_tokens=144, summary_tokens=20, turn_tokens=24, max_turns=26, temperature=0.5)
VALUES = st.none() | st.booleans() | st.integers(-10, 2**62) | st.floats() | st.text(max_size=4)
NAMES = st.sampled_from([*SummaryLimits.__struct_fields__, "format", "summaries", "other"])
OBJECTS = st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES))


def written(folder: Path, text: str) -> Path:
    (folder / FILE).write_text(text)
    return folder


def test_what_an_export_writes_is_what_serving_reads(tmp_path: Path) -> None:
    assert settings_files(None) == {}
    assert summaries_of_checkpoint(tmp_path) is None
    written(tmp_path, settings_files(LIMITS)[FILE])
    assert summaries_of_checkpoint(tmp_path) == LIMITS
    assert parts_of(tmp_path, "m").summaries == LIMITS
    write_sums(tmp_path)
    written(tmp_path, settings_files(msgspec.structs.replace(LIMITS, turn_tokens=25))[FILE])
    with pytest.raises(CheckpointError):
        summaries_of_checkpoint(tmp_path)


@pytest.mark.parametrize("tokens", [0, 20])
def test_the_settings_are_those_of_the_runs_harness(tmp_path: Path, tokens: int) -> None:
    harness = f"context_tokens = 144\nsummary_tokens = {tokens}\nturn_tokens = 24\nmax_turns = 26\n"
    toml = f"[harness]\n{harness}[rl]\ntemperature = 0.5\n"
    run = RunFolder.create(tmp_path / "r", config_toml=toml, seed=0)
    assert summaries_of_run(run) == (LIMITS if tokens else None)


def test_a_config_without_the_settings_has_no_summaries(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "r", config_toml="seed = 1\n", seed=0)
    assert summaries_of_run(run) is None
    run = RunFolder.create(tmp_path / "s", config_toml=to_toml(RunConfig()), seed=0)
    assert summaries_of_run(run) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"summary_tokens": 37},
        {"summary_tokens": 0},
        {"turn_tokens": 144},
        {"max_turns": 0},
        {"temperature": 5},
        {"context_tokens": "144"},
        {"more": 1},
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    text = json.dumps({"format": 1, "summaries": {**msgspec.to_builtins(LIMITS), **wrong}})
    with pytest.raises(CheckpointError, match=FILE) as refused:
        summaries_of_checkpoint(written(tmp_path, text))
    assert "hint:" in str(refused.value)


def test_the_file_of_a_later_etude_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"format": 2, "summaries": msgspec.to_builtins(LIMITS)})
    with pytest.raises(CheckpointError, match="has format 2"):
        summaries_of_checkpoint(written(tmp_path, text))


@given(st.binary(max_size=40) | OBJECTS.map(msgspec.json.encode))
def test_any_content_is_settings_or_an_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_bytes(data)
        try:
            found = summaries_of_checkpoint(Path(folder))
        except CheckpointError:
            return
        assert isinstance(found, SummaryLimits)
