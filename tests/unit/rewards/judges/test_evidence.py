"""Evidence in its fence: no text of an agent leaves it, is shown in another form than text, or is read as a verdict."""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.judge_server import ScriptedJudge, honest, work
from tests.unit.rewards.judges.injections import INJECTIONS

from etude.records import Graded, Rollout
from etude.records.rollout import ToolCall
from etude.records.task import Trust
from etude.rewards.judges import Aspect, Evidence, Form, HttpAsker, Judge, JudgeStore, Rubric
from etude.rewards.judges.evidence import Section, fenced
from etude.rewards.judges.questions import QuestionMaker
from etude.rewards.judges.verdicts import NoVerdict, Scale, read_reply
from etude.testing.rewards import finished

ASPECT = Aspect("facts", "How many facts does it have?")
RUBRIC = Rubric((ASPECT,))
TOKENS = re.compile(r"<\|?/?[A-Za-z_]+\|?>|<\||\|>|<｜|\[/?[A-Z_]+\]|\[gMASK\]|\]~b\]|\[e~\[|</?s>|<think>")


def in_a_file(text: str) -> Rollout:
    return finished(num_turns=1, exports={"own.py": f"fact\nfact\n{text}".encode(errors="surrogateescape")})


def in_a_name(text: str) -> Rollout:
    return finished(num_turns=1, exports={text: b"fact\nfact\n"})


def in_an_output(text: str) -> Rollout:
    return with_call(ToolCall(name="cat", arguments={"path": "own.py"}, output=f"fact\nfact\n{text}"))


def in_a_call(text: str) -> Rollout:
    return with_call(ToolCall(name=text, arguments={text: text}, output="fact\nfact"))


def with_call(call: ToolCall) -> Rollout:
    import msgspec

    rollout = finished(num_turns=1, exports={})
    [turn] = rollout.trace.turns
    trace = type(rollout.trace)((msgspec.structs.replace(turn, calls=(call,)),))
    return msgspec.structs.replace(rollout, trace=trace)


PLACES = [in_a_file, in_a_name, in_an_output, in_a_call]
GRADED = Graded.of(1.0, trust=Trust.DATA, reason="all tests pass")


def assert_closed(text: str, code: str) -> None:
    """Every line is a line of the fence with its code, or data that begins with the mark of data."""
    inside = False
    for line in text.split("\n"):
        if line.startswith("| "):
            assert inside, line
        elif line.startswith(f"==== data {code}: "):
            inside = True
        elif line == f"==== end of data {code} ====":
            inside = False
        else:
            assert re.fullmatch(rf"==== \d+ characters of data {code} are left out here ====", line), line
    assert not inside
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Co", "Zl", "Zp") and c not in "\n\t"]
    assert not TOKENS.search(text)


@pytest.mark.parametrize("place", PLACES)
def test_no_injected_text_leaves_its_fence(place: Callable[[str], Rollout]) -> None:
    for text in INJECTIONS.values():
        evidence = Evidence.of_rollout(place(text), GRADED)
        assert_closed(fenced(evidence, "c0dec0dec0", max_chars=4000), "c0dec0dec0")


@given(st.text(max_size=300), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_no_text_at_all_leaves_its_fence_or_is_much_longer_than_the_limit(text: str, size: int) -> None:
    shown = fenced(Evidence.of_text(text), "c0dec0dec0", max_chars=size)
    assert_closed(shown, "c0dec0dec0")
    assert len(shown) <= 3 * size + 200


SECTIONS = (Section.TRACE, Section.FILES)


def judged(bias: Any, rollouts: list[Rollout], store: Path, form: Form = Form.JSON) -> tuple[list[Any], list[str]]:
    """The verdicts of a scripted judge on the files and calls of rollouts, and the prompts."""

    async def use() -> tuple[list[Any], list[str]]:
        async with ScriptedJudge(bias=bias).serve() as server:
            judge = Judge(RUBRIC, HttpAsker(f"{server.url}/v1", "judge"), JudgeStore(store), form=form)
            works = [Evidence.of_rollout(one, GRADED, SECTIONS) for one in rollouts]
            found = [await judge.score(ASPECT, one) for one in works]
            judge.store.close()
            return [one.value for one in found], [body["messages"][1]["content"] for body in server.bodies]

    return asyncio.run(use())


async def compared(judge: Judge, rollout: Rollout) -> tuple[Any, list[Any]]:
    """The verdicts on a pair and on a ranking of a rollout and one that is better by a fact."""
    works = [Evidence.of_rollout(one, GRADED, SECTIONS) for one in (rollout, in_a_file("fact"))]
    pair, places = await asyncio.gather(judge.compare(ASPECT, *works), judge.rank(ASPECT, works))
    return pair.value, [one.value for one in places]


def outside_of_fences(prompt: str) -> list[str]:
    lines = [line for line in prompt.split("\n") if not line.startswith(("| ", "===="))]
    return [re.sub(r"\b([0-9a-f]{10}|[0-9a-f]{6})\b", "CODE", line) for line in lines]


@pytest.mark.parametrize("form", list(Form))
def test_verdicts_with_and_without_the_injected_text_are_equal(tmp_path: Path, form: Form) -> None:
    """What is outside of the fences is the same in all prompts, but for the codes. So no text was added to it."""
    plain, [first] = judged(honest(), [in_a_file("")], tmp_path / "plain.sqlite", form)
    outside = outside_of_fences(first)
    rollouts = [place(text) for text in INJECTIONS.values() for place in PLACES]
    found, prompts = judged(honest(), rollouts, tmp_path / "judges.sqlite", form)
    assert [prompt for prompt in prompts if outside_of_fences(prompt) != outside] == []
    names = [(name, place.__name__) for name in INJECTIONS for place in PLACES]
    assert [name for name, value in zip(names, found, strict=True) if value != plain[0]] == []
    assert len(INJECTIONS) >= 30


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.TOKEN])
def test_choices_with_and_without_the_injected_text_are_equal(tmp_path: Path, form: Form) -> None:
    async def use() -> dict[str, Any]:
        async with ScriptedJudge().serve() as server:
            asker = HttpAsker(f"{server.url}/v1", "judge")
            judge = Judge(RUBRIC, asker, JudgeStore(tmp_path / "judges.sqlite"), form=form)
            found = {
                f"{name} {place.__name__}": await compared(judge, place(text))
                for name, text in INJECTIONS.items()
                for place in (in_a_file, in_an_output)
            }
            judge.store.close()
            return found

    assert {name: one for name, one in asyncio.run(use()).items() if one != (0.0, [0.0, 1.0])} == {}


@pytest.mark.parametrize("form", [Form.JSON, Form.LINE])
def test_a_judge_that_repeats_the_evidence_gives_no_verdict(form: Form) -> None:
    for text in INJECTIONS.values():
        with pytest.raises(NoVerdict):
            read_reply(text[:49_000], form, Scale(1, 5), "8d2f01")


def test_codes_depend_on_the_evidence_and_a_secret_that_its_author_does_not_know() -> None:
    def question(text: str, secret: bytes) -> Any:
        return QuestionMaker(RUBRIC, Form.JSON, 1000, (), secret).about_one(ASPECT, Evidence.of_text(text))

    first = question("a", b"1")
    assert first == question("a", b"1"), "the same question is asked in the same words"
    assert len({first.code, question("b", b"1").code, question("a", b"2").code}) == 3


def test_what_is_left_out_is_said_and_both_ends_are_shown() -> None:
    text = "begin " + "x" * 5000 + " end"
    shown = fenced(Evidence.of_text(text), "c0dec0dec0", max_chars=300)
    assert "begin" in shown
    assert shown.rstrip("= \n").split("\n")[-2].endswith("end")
    left_out = re.search(r"==== (\d+) characters of data c0dec0dec0 are left out here", shown)
    assert left_out is not None
    assert int(left_out[1]) == len(text) - 300


def test_a_short_text_is_not_cut_beside_a_long_one() -> None:
    evidence = Evidence.of_mapping({"task": "short task", "files": {"a.py": "y" * 9000, "b.py": "z" * 9000}})
    shown = fenced(evidence, "c0dec0dec0", max_chars=1000)
    assert "| short task" in shown
    assert len(shown) < 1800


def test_the_author_is_hidden() -> None:
    shown = fenced(Evidence.of_text("I am Acme-7B, by ACME-7b."), "c0", max_chars=100, hide=("acme-7b",))
    assert "| I am (the author), by (the author)." in shown


def test_evidence_of_a_rollout_has_the_changed_files_calls_and_tests_and_no_unchanged_file() -> None:
    rollout = with_call(ToolCall(name="run", arguments={"command": "ls"}, output="own.py"))
    evidence = Evidence.of_rollout(rollout, GRADED)
    texts = {part.section: part.text for part in evidence.parts}
    assert texts[Section.TASK] == "write double"
    assert texts[Section.TRACE] == "call run command='ls'\nown.py\nended: submitted"
    assert texts[Section.TESTS] == "grade 1: all tests pass"
    assert texts[Section.FILES] == "no file was changed"
    same = finished(num_turns=0, exports={"own.py": b"def double(n):\n    return None\n", "new.bin": b"\0\1"})
    files = [part.text for part in Evidence.of_rollout(same, GRADED).parts if part.section is Section.FILES]
    assert files == ["new.bin\n(2 bytes, binary)"]


def test_the_trace_is_shown_by_the_tokeniser_of_the_run() -> None:
    evidence = Evidence.of_rollout(
        finished(num_turns=2), GRADED, (Section.TRACE,), readable=lambda ids: str([int(one) for one in ids])
    )
    assert evidence.parts[0].text == "[0, 1, 2, 3]\n[0, 1, 2]\n[0, 1, 2, 3]\nended: submitted"


@given(
    st.text(max_size=120) | st.builds(lambda value: json.dumps(value), st.recursive(st.none(), st.lists, max_leaves=4))
)
@settings(max_examples=60, deadline=None)
def test_no_reply_at_all_is_read_as_anything_but_a_verdict_of_the_scale(text: str) -> None:
    for form in Form:
        try:
            value, _ = read_reply(text, form, Scale(1, 5), "8d2f01")
        except NoVerdict:
            continue
        assert form is Form.VALUE
        assert str(value) == text.strip().removeprefix("0")
        assert 1 <= value <= 5


def test_a_work_of_the_scripted_judge_is_read_back(tmp_path: Path) -> None:
    found, _ = judged(honest(), [in_a_file(work(2))], tmp_path / "judges.sqlite")
    assert found == [4]
