"""A judge compared with people: agreement, biases, the two halves of the labels, and what cannot be measured."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.judge_server import HIGH, LOW, SIGNATURE, Bias, ScriptedJudge, honest, longer, praises_itself, truth, work

from etude.errors import InputError
from etude.rewards.judges import Aspect, Evidence, HttpAsker, Judge, JudgeStore, Limits, Rubric
from etude.rewards.judges.agreement import LEFT_OUT, clustered_mean, concordance, kappa, mean
from etude.rewards.judges.calibration import AspectReport, Half, Label, calibrate, distance, read_labels
from etude.rewards.judges.terms import GroupJudgeTerm, JudgeTerm, Mode

ASPECT = Aspect("facts", "How many facts does it have?")
RUBRIC = Rubric((ASPECT,))


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Works of all qualities and lengths by two authors, with true labels."""
    draw, found = random.Random(seed), []
    for number in range(count):
        facts, signed = draw.randint(LOW, HIGH), draw.random() < 0.5
        text = work(facts, filler=draw.randint(0, 120), signed=signed, more=f"number {number}")
        found.append({"work": text, "label": facts, "author": "tiny" if signed else "large"})
    return found


def pairs(count: int) -> list[dict[str, Any]]:
    draw, found = random.Random(1), []
    for number in range(count):
        a, b = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
        label = "first" if a > b else "second" if b > a else "tie"
        found.append({"first": work(a, more=f"a{number}"), "second": work(b, more=f"b{number}"), "label": label})
    return found


def written(tmp_path: Path, given: list[Any]) -> Path:
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def no_rollouts(rollout_id: str) -> Evidence:
    raise InputError(f"no {rollout_id}", hint="none")


def reported(
    tmp_path: Path, given: list[Any], bias: Bias | None = None, mode: Mode = Mode.POINTWISE, **script: Any
) -> AspectReport:
    labels = read_labels(written(tmp_path, given), RUBRIC, no_rollouts)

    async def use() -> list[AspectReport]:
        async with ScriptedJudge(bias=bias or honest(), **script).serve() as server:
            judge = judge_at(server.url, tmp_path / "judges.sqlite")
            return await calibrate(judge, labels, mode)

    [found] = asyncio.run(use())
    return found


def judge_at(url: str, store: Path) -> Judge:
    return Judge(RUBRIC, HttpAsker(f"{url}/v1", "judge"), JudgeStore(store), limits=Limits(at_once=16))


def test_an_honest_judge_agrees_and_has_no_bias(tmp_path: Path) -> None:
    found = reported(tmp_path, rows(80), honest(0.1))
    assert found.kappa.value > 0.9
    assert found.auc is not None
    assert found.auc.value > 0.95
    assert 0.8 < found.exact < 1.0
    assert found.biases == []
    assert (found.num_labels, found.num_unknown) == (80, 0)


def test_a_judge_that_likes_length_is_said_to(tmp_path: Path) -> None:
    found = reported(tmp_path, rows(80), longer())
    assert found.length is not None
    assert found.length.low > 0.2
    assert "longer works get more than from people" in found.biases
    assert found.kappa.value < 0.5


def test_a_judge_that_praises_itself_is_said_to(tmp_path: Path) -> None:
    found = reported(tmp_path, rows(80), praises_itself())
    assert found.authors["tiny"].low > 0.5
    assert found.authors["large"].high < -0.5
    assert "works by tiny get more than from people" in found.biases
    assert SIGNATURE


def grouped(count: int) -> list[dict[str, Any]]:
    """Works as in `rows`, in groups of four."""
    return [row | {"group": f"task {number // 4}"} for number, row in enumerate(rows(count))]


@pytest.mark.parametrize(("mode", "made"), [("pairwise", pairs), ("pairwise", grouped), ("ranking", grouped)])
def test_a_judge_that_prefers_what_is_shown_first_is_said_to(tmp_path: Path, mode: str, made: Any) -> None:
    plain = reported(tmp_path / "..", made(60), mode=Mode(mode))
    assert plain.prefers_first is not None
    assert plain.auc is not None
    assert (plain.prefers_first.value, plain.kappa.value, plain.auc.value, plain.biases) == (0.0, 1.0, 1.0, [])
    (tmp_path / "b").mkdir()
    found = reported(tmp_path / "b", made(60), mode=Mode(mode), prefers_first=0.6)
    assert found.prefers_first is not None
    assert found.prefers_first.low > 0.1
    assert "the first of two works is preferred" in found.biases
    assert found.num_labels == (60 if made is pairs else 15 * 6)


@pytest.mark.parametrize("mode", ["pairwise", "ranking"])
def test_a_judge_that_compares_works_is_measured_on_groups_and_its_biases_are_named(tmp_path: Path, mode: str) -> None:
    server = ScriptedJudge(bias=praises_itself())
    labels = read_labels(written(tmp_path, grouped(120)), RUBRIC, no_rollouts)

    async def use() -> list[AspectReport]:
        async with server.serve():
            return await calibrate(judge_at(server.url, tmp_path / "judges.sqlite"), labels, Mode(mode))

    [found] = asyncio.run(use())
    assert len(server.bodies) == (2 * 30 * 6 if mode == "pairwise" else 2 * 30), "the questions of the term"
    assert found.authors["tiny"].low > 0.1
    assert "works by tiny get more than from people" in found.biases
    assert found.auc is not None
    assert 0.5 < found.auc.value < 1.0
    long = reported(tmp_path / "..", grouped(80), longer(), Mode(mode))
    assert "longer works get more than from people" in long.biases


def test_biases_of_labelled_pairs_are_named_where_the_labels_have_authors(tmp_path: Path) -> None:
    given = []
    for number, row in enumerate(pairs(120)):
        signed = number % 2
        texts = {
            key: f"{row[key]}{f'{chr(10)}{SIGNATURE}' * (signed == at)}" for at, key in enumerate(("first", "second"))
        }
        given.append(row | texts | {"author": ["large", "tiny"] if signed else ["tiny", "large"]})
    found = reported(tmp_path, given, praises_itself(), Mode.PAIRWISE)
    assert "works by tiny get more than from people" in found.biases
    assert "works by large get less than from people" in found.biases
    by_scores = reported(tmp_path / "..", given, praises_itself())
    assert by_scores.prefers_first is None, "a judge that sees one work at a time"
    assert by_scores.authors.keys() == found.authors.keys()


def test_a_judge_that_compares_works_needs_works_to_compare(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be calibrated on these labels") as refused:
        reported(tmp_path, rows(10), mode=Mode.RANKING)
    assert '"group"' in refused.value.hint


def test_labels_of_one_class_are_refused(tmp_path: Path) -> None:
    same = [row | {"label": 4} for row in rows(10)]
    with pytest.raises(InputError, match="'facts' are all equal") as refused:
        reported(tmp_path, same)
    assert refused.value.facts == "10 labels, all 4"


def test_a_judge_without_verdicts_is_not_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few verdicts") as refused:
        reported(tmp_path, rows(6), fault=lambda _: 401)
    assert "status 401" in refused.value.facts


def test_verdicts_that_are_unknown_are_counted_and_are_in_no_number(tmp_path: Path) -> None:
    found = reported(tmp_path, rows(30), fault=lambda number: 400 if number <= 5 else None)
    assert (found.num_labels, found.num_unknown, found.exact) == (25, 5, 1.0)
    assert "status 400" in found.why_unknown


def test_each_work_is_in_one_half_whatever_its_label_author_or_place(tmp_path: Path) -> None:
    given = rows(200)
    halves = [one.half for one in read_labels(written(tmp_path, given), RUBRIC, no_rollouts)]
    assert 70 < halves.count(Half.TUNE) < 130
    other = [row | {"label": 1, "author": "x"} for row in reversed(given)]
    assert [one.half for one in read_labels(written(tmp_path, other), RUBRIC, no_rollouts)] == halves[::-1]
    ab = Label(ASPECT, Evidence.of_text("a"), Evidence.of_text("b"), 1, "")
    ba = Label(ASPECT, Evidence.of_text("b"), Evidence.of_text("a"), -1, "")
    assert ab.half is ba.half


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"label": 3}, "no work"),
        ({"work": "a"}, "label"),
        ({"work": "a", "label": 9}, "expected a score from 1 to 5"),
        ({"work": "a", "label": "good"}, "expected a score from 1 to 5"),
        ({"work": "a", "label": True}, "label"),
        ({"work": "a", "rollout": "g1.0", "label": 3}, "work and rollout"),
        ({"first": "a", "label": "first"}, "it has first"),
        ({"first": "a", "second": "b", "label": 1}, "first, second or tie"),
        ({"first": "a", "second": "b", "label": "tie", "author": "x"}, "a list of two names"),
        ({"work": "a", "label": 3, "author": ["x", "y"]}, "one name for one work"),
        ({"work": {"music": "la"}, "label": 3}, "music"),
        ({"work": {}, "label": 3}, "the evidence is empty"),
        ({"work": "a", "label": 3, "aspect": "colour"}, "expected one of the rubric: facts"),
        ({"work": "a", "label": 3, "lable": 3}, "lable"),
        ("text", "Expected `object`"),
    ],
)
def test_what_is_no_label_is_refused_with_its_line(tmp_path: Path, row: Any, named: str) -> None:
    path = written(tmp_path, [{"work": "fine", "label": 1}, row])
    with pytest.raises(InputError, match=r"line 2 of .* is not a label") as refused:
        read_labels(path, RUBRIC, no_rollouts)
    assert named in refused.value.facts


def confusion(people: list[int], judge: list[int], lowest: int, highest: int) -> Any:
    table = np.zeros((highest - lowest + 1,) * 2)
    np.add.at(table, (np.array(people) - lowest, np.array(judge) - lowest), 1)
    return table


def test_kappa_and_auc_are_those_of_their_definitions() -> None:
    draw = np.random.default_rng(3)
    people = draw.integers(1, 6, 60)
    judge = np.clip(people + draw.integers(-2, 3, 60), 1, 5)
    table = confusion(people.tolist(), judge.tolist(), 1, 5)
    chance = ((people[:, None] - judge[None]) ** 2).mean()
    assert kappa(table) == pytest.approx(1 - ((people - judge) ** 2).mean() / chance)
    won = [
        0.5 if judge[i] == judge[k] else float(judge[i] > judge[k])
        for i in range(60)
        for k in range(60)
        if people[i] > people[k]
    ]
    assert concordance(table) == pytest.approx(np.mean(won))
    assert kappa(confusion([0, 0, 1, 1], [0, 0, 1, 1], 0, 1)) == 1.0
    assert kappa(confusion([0, 1, 0, 1], [0, 0, 1, 1], 0, 1)) == 0.0
    assert concordance(confusion([0, 1], [1, 0], 0, 1)) == 0.0


def far(tmp_path: Path, modes: tuple[str, str], groups: int, size: int) -> Any:
    """The distance between two judges of the same works."""

    async def use() -> Any:
        async with ScriptedJudge(bias=honest(0.2)).serve() as first, ScriptedJudge(seed=1).serve() as second:
            works = [
                [Evidence.of_text(work((n + k) % 5 + 1, more=f"{n} {k}")) for k in range(size)] for n in range(groups)
            ]
            both = [
                (JudgeTerm if mode == "pointwise" else GroupJudgeTerm)(judge_at(url, tmp_path / name), Mode(mode), ())
                for mode, url, name in zip(modes, (first.url, second.url), "ab", strict=True)
            ]
            return await distance(*both, works)

    return asyncio.run(use())


@pytest.mark.parametrize("number", [LEFT_OUT - 1, LEFT_OUT + 500])
def test_works_that_are_independent_have_the_plain_interval_however_many_there_are(number: int) -> None:
    values = np.random.default_rng(0).normal(size=number).tolist()
    plain = mean(values)
    assert clustered_mean(range(number), values) == plain
    twice = clustered_mean([*range(number)] * 2, values * 2)
    assert twice.value == pytest.approx(plain.value)
    assert twice.high - twice.low == pytest.approx(plain.high - plain.low, rel=0.1), "each work counts once"


def test_the_distance_to_an_auditor_is_measured_with_an_upper_bound(tmp_path: Path) -> None:
    found = far(tmp_path, ("pointwise", "pointwise"), 100, 1)
    assert 0.0 < found.low < found.value < found.high < 0.25


def test_the_distance_of_judges_that_rank_is_that_of_their_ranks_and_no_other_mode_is_compared(tmp_path: Path) -> None:
    found = far(tmp_path, ("ranking", "ranking"), 30, 4)
    assert 0.0 < found.low < found.value < found.high < 0.3, "against scores it would be .35 for perfect judges"
    with pytest.raises(InputError, match="distance to the auditor cannot be measured") as refused:
        far(tmp_path, ("ranking", "pointwise"), 3, 4)
    assert "mode = 'ranking'" in refused.value.facts


def test_works_of_one_group_are_in_one_half_and_are_one_cluster(tmp_path: Path) -> None:
    given = [row | {"group": f"task {number // 4}"} for number, row in enumerate(rows(200))]
    labels = read_labels(written(tmp_path, given), RUBRIC, no_rollouts)
    assert all(len({one.half for one in labels[at : at + 4]}) == 1 for at in range(0, 200, 4))
    assert {one.half for one in labels} == set(Half)

    def by_number(text: str, draw: random.Random) -> int:
        """Half of the works get a random score; copies of a work get the same."""
        number = next(line for line in text.splitlines() if line.startswith("number"))
        fixed = random.Random(number)
        return fixed.randint(LOW, HIGH) if fixed.random() < 0.5 else truth(text)

    def width(name: str, given: list[dict[str, Any]]) -> npt.NDArray[np.float64]:
        (tmp_path / name).mkdir()
        found = reported(tmp_path / name, given, by_number)
        assert found.auc is not None
        assert found.length is not None
        return np.array([one.high - one.low for one in (found.auc, found.length, found.authors["tiny"])])

    once = rows(40)
    copies = [
        row | {"work": f"{row['work']}\n{copy}", "group": str(n)} for n, row in enumerate(once) for copy in "abcd"
    ]
    plain, together = width("once", once), width("together", copies)
    alone = width("alone", [row | {"group": ""} for row in copies])
    assert (alone < 0.7 * plain).all(), "four copies of each work, taken for independent"
    assert ((0.8 * plain < together) & (together < 1.25 * plain)).all()


def test_a_line_break_that_is_none_in_json_may_be_in_a_label(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(json.dumps({"work": "one\u2028two\x85three", "label": 2}, ensure_ascii=False) + "\n")
    [label] = read_labels(path, RUBRIC, no_rollouts)
    assert label.work == Evidence.of_text("one\u2028two\x85three")
