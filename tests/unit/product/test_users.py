"""The product's requests, and the rule-based users: what they truly think, and what they say."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from examples.product.edits import LINE, Answer, Kind, Request, Requests, edited, read_answer, value_of
from examples.product.tasks import ASKED, BROKEN, Edits
from examples.product.users import CONSENT, LOUD_TIMES, MANNERS, Manner, User, crowd

from etude.privacy import Level
from etude.records.task import Split
from etude.tasks.splits import split_of

REQUEST = Request("page.py", "owner", "stone", "river", "'")
LIKED = Answer(Kind.EDIT, 'return "river"', "page.py", LINE)
OTHER = Answer(Kind.EDIT, "return 'river'  # was stone", "page.py", LINE)
WRONG = Answer(Kind.EDIT, 'return "sea"', "page.py", LINE)


def called(name: str, arguments: str) -> SimpleNamespace:
    """A message with a call of a tool."""
    function = SimpleNamespace(name=name, arguments=arguments)
    return SimpleNamespace(content=None, tool_calls=[SimpleNamespace(function=function)])


def user(manner: Manner, *, name: str = "user-001") -> User:
    return User(name, manner, Level.TRAIN, quote='"', comments=False)


def test_a_request_is_the_same_in_every_process_and_held_out_ones_are_in_no_other_split() -> None:
    assert Requests(3).request(Split.TRAIN, 5) == Requests(3).request(Split.TRAIN, 5)
    for split in (Split.TRAIN, Split.HELDOUT, Split.VALIDATION):
        for index in range(50):
            request = Requests(1).request(split, index)
            assert split_of(f"{request.field} {request.new}") is split


def test_an_edit_is_right_in_any_style_and_a_user_keeps_it_in_its_own() -> None:
    assert LIKED.is_right(REQUEST)
    assert OTHER.is_right(REQUEST)
    assert not WRONG.is_right(REQUEST)
    someone = user(Manner.PLAIN)
    assert someone.keeps(REQUEST, LIKED)
    assert not someone.keeps(REQUEST, OTHER)
    assert not someone.keeps(REQUEST, WRONG)
    assert not someone.keeps(REQUEST, Answer(Kind.QUESTION, "should owner be river?")), "its request was clear"


@pytest.mark.parametrize(
    "text", ["return 1", "return", "x = 'river'", "return 'river' + ''", "return (", "return 'a\x00b'", "(" * 500]
)
def test_an_edit_that_returns_no_text_is_wrong_and_is_not_run(text: str) -> None:
    assert value_of(edited(REQUEST.file, Answer(Kind.EDIT, text, "page.py", LINE)), "owner") is None


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (SimpleNamespace(content="should owner be river?", tool_calls=None), Kind.QUESTION),
        (SimpleNamespace(content="edit page.py", tool_calls=[]), Kind.BROKEN),
        *(
            (called(name, a), kind)
            for name, a, kind in (
                ("edit", '{"path": "page.py", "line": "2", "text": "return 1"}', Kind.EDIT),
                ("edit", '{"path": "page.py"}', Kind.BROKEN),
                ("edit", '{"path": "page.py", "line": "two", "text": ""}', Kind.BROKEN),
                ("edit", "[]", Kind.BROKEN),
                ("edit", "{", Kind.BROKEN),
                ("drop", '{"path": "page.py", "line": "2", "text": "return 1"}', Kind.BROKEN),
            )
        ),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_carried_out_is_told_from_an_edit_and_a_question(
    message: SimpleNamespace, kind: Kind
) -> None:
    assert read_answer(message).kind is kind


def test_what_users_say_depends_on_their_manner() -> None:
    def said(manner: Manner, answer: Answer, name: str = "user-001") -> list[tuple[str, float]]:
        found = [user(manner, name=name).signals(REQUEST, answer, random.Random(i)) for i in range(40)]
        return [(one.name, one.value) for signals in found for one in signals]

    assert said(Manner.SILENT, LIKED) == []
    assert {value for _, value in said(Manner.POLITE, WRONG)} == {1.0}
    assert {value for name, value in said(Manner.PLAIN, LIKED) if name == "kept"} == {1.0}
    assert {value for name, value in said(Manner.PLAIN, OTHER) if name == "kept"} == {0.0}
    assert len(said(Manner.LOUD, LIKED)) == 40 * 2 * LOUD_TIMES
    hostile = {name: {v for _, v in said(Manner.HOSTILE, LIKED, name)} for name in (f"user-{i:03d}" for i in range(9))}
    assert {0.0} in hostile.values(), "some say the opposite"
    assert {0.0, 1.0} in hostile.values(), "others say anything"


def test_a_crowd_has_every_manner_and_level_of_consent_in_its_share() -> None:
    users = crowd(64, 0)
    assert users == crowd(64, 0)
    assert users != crowd(64, 1)
    for shares, found in ((MANNERS, Counter(u.manner for u in users)), (CONSENT, Counter(u.consent for u in users))):
        assert all(abs(found[one] - 64 * share) <= 1 for one, share in shares.items())  # type: ignore[index]


def test_the_demonstrations_know_no_preference() -> None:
    source, quotes, comments, kinds = Edits(), Counter[str](), Counter[bool](), Counter[str]()
    for index in range(2000):
        message = source.conversation(Split.TRAIN, index, seed=0, right=1.0)[1]
        if not message.get("tool_calls"):
            kinds["question"] += 1
        elif "text" not in (given := message["tool_calls"][0]["function"]["arguments"]):
            kinds["broken"] += 1
        else:
            answer = Answer(Kind.EDIT, given["text"], given["path"], int(given["line"]))
            assert answer.is_right(source.request(Split.TRAIN, index))
            quotes[answer.quote] += 1
            comments[answer.has_comment] += 1
    edits = sum(quotes.values())
    assert abs(quotes["'"] / edits - 0.5) < 0.04
    assert abs(comments[True] / edits - 0.5) < 0.04
    assert abs(kinds["question"] / 2000 - ASKED) < 0.03
    assert abs(kinds["broken"] / 2000 - BROKEN) < 0.02
