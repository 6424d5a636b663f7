from __future__ import annotations

import pytest

from etude.privacy import redact_text, redact_value


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("mail bob.smith+x@mail.example.org now", "bob.smith"),
        ("open /home/bob/plans/next.txt please", "bob"),
        ("open ~/plans/next.txt", "plans"),
        (r"open C:\Users\bob\plans.txt", "bob"),
        ("key " + "0a1b2c3d" * 4, "0a1b2c3d"),
        ("DB_PASSWORD=correct-horse", "correct"),
        ("Authorization: Bearer abc.def-123", "abc.def"),
        ('{"api_key": "k1v2k3v4k5"}', "k1v2"),
        ("use AKIA2E0A8F3B244C9986", "AKIA2E"),
        ("postgres://bob:Ahr7tu2x@host/x", "Ahr7"),
    ],
)
def test_what_people_need_not_see_is_hidden(text, hidden):
    assert hidden in text
    assert hidden not in redact_text(text)
    assert hidden not in str(redact_value({"a": [text], text: 1}))


@pytest.mark.parametrize("text", ["", "fix the failing test", "1/2 and 3/4", "def f(x): return x @ y", "deadbeef"])
def test_plain_text_stays(text):
    assert redact_text(text) == text
