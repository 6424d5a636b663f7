"""Bodies and lines with signals: what is accepted, and which field an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.errors import SignalRefused
from etude.signals.messages import MAX_SIGNALS, parse_body, parse_line

GOOD: dict[str, Any] = {"id": "1", "response_id": "x", "name": "kept", "value": True}


@pytest.mark.parametrize("value", [True, False, 0, 1, 0.25])
def test_a_value_is_a_bool_or_a_number_in_0_to_1(value: Any) -> None:
    [signal] = parse_body(json.dumps(GOOD | {"value": value}).encode())
    assert float(signal.value) == float(value)
    assert parse_line(json.dumps(GOOD | {"value": value}).encode()).organisation == "local"


def test_a_request_has_one_signal_or_many() -> None:
    assert len(parse_body(json.dumps({"signals": [GOOD] * MAX_SIGNALS}).encode())) == MAX_SIGNALS
    for number in (0, MAX_SIGNALS + 1):
        with pytest.raises(SignalRefused, match=f"has {number} signals"):
            parse_body(json.dumps({"signals": [GOOD] * number}).encode())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"value": 1.01}, "value"),
        ({"value": -1}, "value"),
        ({"value": "1"}, "value"),
        ({"value": None}, "value"),
        ({"name": ""}, "name"),
        ({"name": "Kept"}, "name"),
        ({"name": "k" * 65}, "name"),
        ({"name": "kept\n"}, "name"),
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"id": 7}, "id"),
        ({"answer": -1}, "answer"),
        ({"answer": 16}, "answer"),
        ({"at": 1.7e12}, "at"),
        ({"at": -1.0}, "at"),
        ({"at": "now"}, "at"),
        ({"response_id": None}, "response_id"),
    ],
)
def test_an_invalid_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(SignalRefused, match="hint: ") as refused:
        parse_body(json.dumps(GOOD | change).encode())
    assert (refused.value.reason, refused.value.param) == ("invalid", param)
    with pytest.raises(SignalRefused) as refused:
        parse_body(json.dumps({"signals": [GOOD, GOOD | change]}).encode())
    assert refused.value.param == f"signals[1].{param}"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"1", b"\xff", b"[" * 5000, b'{"signals": 3}', json.dumps(GOOD | {"x": 1}).encode()],
)
def test_any_other_body_is_refused(body: bytes) -> None:
    with pytest.raises(SignalRefused, match="hint: "):
        parse_body(body)
    with pytest.raises(SignalRefused, match="hint: "):
        parse_line(body)
