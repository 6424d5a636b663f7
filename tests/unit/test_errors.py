"""Errors that cross the border of a process."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.errors import ConfigErrors, EtudeError, SignalRefused, raise_all
from etude.gateway.errors import RequestRefused, context_exceeded
from etude.harness.episode import EpisodeEnded
from etude.records.rollout import Ending
from etude.rollouts.endpoints import Ended

WITH_OWN_ARGUMENTS: list[EtudeError] = [
    RequestRefused(429, "too many", "9 wait", hint="wait", code="busy", param="model", context="9 > 8", retry_s=7),
    RequestRefused(405, "GET is not offered", hint="send POST", code="method_not_allowed", allow="POST"),
    context_exceeded(8, 9, 1),
    SignalRefused("it is late", "by a day", hint="send it sooner", reason="expired", param="at"),
    Ended("the rollout has ended", "turns"),
    EpisodeEnded(Ending.TURNS),
]


def classes_of_errors() -> dict[str, str]:
    """The bodies of all classes in the source whose bases are errors of etude, by name, which needs no import."""
    text = "\n".join(path.read_text() for path in Path(etude.__file__).parent.rglob("*.py"))
    classes = re.findall(r"^class (\w+)\(([^)=]*)\):\n((?:[ ].*\n|\n)*)", text, re.MULTILINE)
    found = {"EtudeError": ""}
    while new := {name: body for name, bases, body in classes if not found.keys().isdisjoint(bases.split(", "))}:
        if new.keys() <= found.keys():
            break
        found |= new
    return found


def assert_same_after_pickling(error: EtudeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.args, again.__dict__) == (str(error), error.args, error.__dict__)
    assert error.__dict__.keys() >= {"what", "facts", "hint"}


@pytest.mark.parametrize("error", WITH_OWN_ARGUMENTS, ids=lambda error: type(error).__name__)
def test_an_error_with_arguments_of_its_own_is_the_same_after_pickling(error: EtudeError) -> None:
    assert_same_after_pickling(error)
    if isinstance(error, RequestRefused):
        again: Any = pickle.loads(pickle.dumps(error))
        assert again.headers == error.headers


def test_several_errors_of_a_config_are_the_same_after_pickling() -> None:
    with pytest.raises(ConfigErrors) as raised:
        raise_all([EtudeError("a", hint="b"), EtudeError("c", "d", hint="e")])
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert [str(one) for one in again.errors] == [str(one) for one in raised.value.errors]


def test_every_class_of_errors_with_arguments_of_its_own_is_pickled_here_and_no_other_changes_how() -> None:
    classes = classes_of_errors()
    assert len(classes) > 50
    own = {name for name, body in classes.items() if re.search("def __init__|def __new__|__slots__", body)}
    assert own == {type(error).__name__ for error in WITH_OWN_ARGUMENTS}
    assert not [name for name, body in classes.items() if "def __reduce" in body or "def __setstate__" in body]
    left = [EtudeError]
    while left:  # the classes that are imported here
        left += (kind := left.pop()).__subclasses__()
        if kind.__init__ is EtudeError.__init__:
            assert_same_after_pickling(kind("it broke", "at noon", hint="mend it"))
