"""Lines of outcomes from other systems: each is an outcome or an error in three parts, whatever its bytes are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import InputError
from etude.releases.outcomes import Outcome, parse_outcome, read_outcomes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["id", "subject", "metric", "value", "arm", "share", "more"])


@given(st.binary(max_size=200) | st.dictionaries(FIELDS, VALUES).map(lambda one: json.dumps(one).encode()))
def test_any_line_is_an_outcome_or_an_error_in_three_parts(line: bytes) -> None:
    try:
        found = parse_outcome(line)
        found.check({"kept"})
    except InputError as error:
        value, said = 0.0, str(error)
    else:
        value, said = found.value, "hint:"
    assert 0.0 <= value <= 1.0
    assert "hint:" in said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.builds(Outcome, id=st.text(), subject=st.text(), metric=st.text(), value=st.floats(0, 1))))
def test_outcomes_are_read_as_they_were_written(tmp_path: Path, written: list[Outcome]) -> None:
    path = tmp_path / "outcomes.jsonl"
    lines = [
        json.dumps({"id": one.id, "subject": one.subject, "metric": one.metric, "value": one.value}) for one in written
    ]
    path.write_text("\n\n".join(lines))
    assert list(read_outcomes(path)) == written


def test_an_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text('{"id": "1", "subject": "u", "metric": "kept", "value": 1}\n{"id": 2}\n')
    with pytest.raises(InputError, match="line 2 of"):
        list(read_outcomes(path))
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(InputError, match="too long"):
        list(read_outcomes(path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_outcomes(tmp_path / "none.jsonl"))
