"""A judge over HTTP: verdicts in both dialects, what is unknown, limits, money, and what is asked only once."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.clock import run_at_once
from tests.judge_server import ScriptedJudge, SlowAsker, honest, work

from etude.prices import TokenPrices
from etude.rewards.judges import Aspect, Dialect, Evidence, Form, HttpAsker, Judge, JudgeStore, Limits, Rubric, Verdict
from etude.rewards.judges.asking import MAX_TOKENS
from etude.rewards.judges.store import Stored
from etude.rewards.judges.verdicts import Scale, read_reply

T = TypeVar("T")
FACTS = Aspect("facts", "How many facts does it have?")
RUBRIC = Rubric((FACTS,), about="Texts with facts.")


def judge_at(server: ScriptedJudge, store: Path, **other: Any) -> Judge:
    dialect = other.pop("dialect", Dialect.OPENAI)
    url = server.url + ("/v1" if dialect is Dialect.OPENAI else "")
    options = other.pop("options", {"temperature": 0.0})
    asker = HttpAsker(url, other.pop("model", "judge"), dialect, other.pop("key", ""), options)
    return Judge(RUBRIC, asker, JudgeStore(store), first_wait_s=0.01, **other)


def asked(server: ScriptedJudge, use: Callable[[ScriptedJudge], Awaitable[T]]) -> T:
    async def whole() -> T:
        async with server.serve():
            return await use(server)

    return asyncio.run(whole())


def scored(server: ScriptedJudge, tmp_path: Path, text: str = "fact\nfact", **other: Any) -> Verdict:
    async def use(server: ScriptedJudge) -> Verdict:
        judge = judge_at(server, tmp_path / "judges.sqlite", **other)
        try:
            return await judge.score(FACTS, Evidence.of_text(text))
        finally:
            judge.store.close()

    return asked(server, use)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("form", [form for form in Form if form is not Form.TOKEN])  # has no Anthropic dialect
def test_a_judge_scores_a_work_in_each_dialect_and_form(tmp_path: Path, dialect: Dialect, form: Form) -> None:
    server = ScriptedJudge()
    found = scored(server, tmp_path, work(4, filler=30), dialect=dialect, form=form, key="secret")
    assert (found.value, found.cached) == (4, False)
    [body], [headers] = server.bodies, server.headers
    schema = {"json_schema": body.get("response_format", {}), "output_config": body.get("output_config", {})}
    assert any(schema.values()) == (form is Form.JSON)
    assert headers["Authorization" if dialect is Dialect.OPENAI else "x-api-key"].endswith("secret")
    assert body["temperature"] == 0.0


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("It deserves a 5.", "not one JSON object"),
        ("", "not one JSON object"),
        ("I cannot judge this.", "not one JSON object"),
        ("5", "keys reason, verdict and code"),
        ('{"reason": "x", "verdict": 5}', "keys reason, verdict and code"),
        ('{"reason": "x", "verdict": 5, "code": "000000"}', "of no question"),
        ('{"reason": "x", "verdict": NaN, "code": "c"}', "NaN"),
        ('{"reason": "x", "verdict": 1, "verdict": 5, "code": "c"}', "key twice"),
        ("[" * 3000, "not one JSON object"),
    ],
)
def test_a_reply_without_a_verdict_is_unknown_and_not_0(tmp_path: Path, reply: str, why: str) -> None:
    server = ScriptedJudge(fault=lambda _: reply)
    found = scored(server, tmp_path)
    assert found.value is None
    assert "3 replies without a verdict" in found.reason
    assert why in found.reason
    assert len(server.bodies) == 3


def test_failures_that_pass_are_asked_again(tmp_path: Path) -> None:
    faults = [500, "close", "no verdict", (503, "nonsense"), None]
    found = scored(ScriptedJudge(fault=lambda n: faults[n - 1]), tmp_path, work(3))
    assert found.value == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_cannot_pass_is_asked_once_and_says_the_status_without_the_key(tmp_path: Path, status: int) -> None:
    server = ScriptedJudge(fault=lambda _: status)
    found = scored(server, tmp_path, key="planned")
    assert (found.value, found.retry, len(server.bodies)) == (None, False, 1)
    assert f"status {status}" in found.reason
    assert "planned" not in found.reason


def test_retry_after_is_kept_by_all_calls(tmp_path: Path) -> None:
    times = list[float]()

    def fault(number: int) -> Any:
        times.append(time.monotonic())
        return (429, 1) if number == 1 else None

    async def use(server: ScriptedJudge) -> list[Verdict]:
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=Limits(at_once=1))
        works = [Evidence.of_text(work(n)) for n in (1, 2, 3)]
        return await asyncio.gather(*(judge.score(FACTS, one) for one in works))

    found = asked(ScriptedJudge(fault=fault), use)
    assert [one.value for one in found] == [1, 2, 3]
    assert min(times[1:]) - times[0] >= 0.99


def test_a_judge_that_hangs_is_unknown_at_the_deadline_which_names_what_it_waited_for(tmp_path: Path) -> None:
    found = scored(ScriptedJudge(fault=lambda _: "hang"), tmp_path, limits=Limits(deadline_s=0.4))
    assert (found.value, found.retry) == (None, True)
    assert "no verdict within 0.4 s: it waited for the judge's answer" in found.reason


def test_a_judge_that_is_away_is_unknown_and_may_be_known_later(tmp_path: Path) -> None:
    server = ScriptedJudge()
    server.url = "http://127.0.0.1:9"

    async def use() -> Verdict:
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=Limits(deadline_s=0.4))
        return await judge.score(FACTS, Evidence.of_text("fact"))

    found = asyncio.run(use())
    assert (found.value, found.retry) == (None, True)
    assert "cannot be reached" in found.reason


def test_the_same_question_is_asked_once_also_by_another_process_and_at_the_same_time(tmp_path: Path) -> None:
    server = ScriptedJudge()

    async def use(server: ScriptedJudge) -> list[Verdict]:
        first, again = (judge_at(server, tmp_path / "judges.sqlite") for _ in range(2))
        together = await asyncio.gather(*(first.score(FACTS, Evidence.of_text(work(2))) for _ in range(5)))
        return [*together, await again.score(FACTS, Evidence.of_text(work(2)))]

    found = asked(server, use)
    assert [one.value for one in found] == [2] * 6
    assert found[-1].cached
    assert len(server.bodies) == 1


def test_unknown_verdicts_are_not_stored(tmp_path: Path) -> None:
    server = ScriptedJudge(fault=lambda number: "nonsense" if number <= 3 else None)
    assert scored(server, tmp_path).value is None
    assert scored(server, tmp_path).value == 2


def test_another_rubric_model_or_limit_of_evidence_is_another_version(tmp_path: Path) -> None:
    server = ScriptedJudge(url="http://localhost")
    store = tmp_path / "judges.sqlite"
    plain, other = judge_at(server, store), judge_at(server, store, model="other")
    shorter = judge_at(server, store, limits=Limits(max_chars=300))
    changed = judge_at(server, store)
    changed = Judge(Rubric((Aspect("facts", "Count the facts."),)), changed.asker, changed.store)
    assert len({plain.version, other.version, shorter.version, changed.version}) == 4
    assert plain.version == judge_at(server, store, limits=Limits(at_once=3), account="other").version


def test_a_server_that_changes_its_model_gives_no_verdict_that_others_are_compared_with(tmp_path: Path) -> None:
    server = ScriptedJudge()
    assert scored(server, tmp_path, work(2)).value == 2
    server.model = "scripted-2"
    found = scored(server, tmp_path, work(3))
    assert found.value is None
    assert "scripted-2 answered, and scripted-1 before" in found.reason


def test_a_stored_verdict_of_another_served_model_is_asked_again(tmp_path: Path) -> None:
    """Two runs share a store, and the server has replaced the model behind the name between them."""
    server = ScriptedJudge()

    async def use(server: ScriptedJudge) -> list[tuple[int | None, bool, int]]:
        found = []
        for model, run, facts in (
            ("1", "a", 2),
            ("2", "b", 3),
            ("2", "b", 2),
            ("2", "b", 2),
            ("2", "a", 2),
            ("1", "c", 2),
        ):
            server.model = model
            judge = judge_at(server, tmp_path / "judges.sqlite", account=run)
            verdict = await judge.score(FACTS, Evidence.of_text(work(facts)))
            judge.store.close()
            found.append((verdict.value, verdict.cached, len(server.bodies)))
        return found

    first, other, again, stored, late, new = asked(server, use)
    assert [first, other] == [(2, False, 1), (3, False, 2)]
    assert again == (2, False, 3), "run b has compared with verdicts of model 2"
    assert stored == (2, True, 3)
    assert late == (None, False, 4), "run a has compared with verdicts of model 1"
    assert new == (2, True, 4), "a run without a verdict takes the model of a stored one"


TOP = {"token": "1", "logprob": -0.1}


@pytest.mark.parametrize(
    ("body", "after", "why"),
    [
        (
            {
                "choices": [
                    {"logprobs": {"content": [{**TOP, "top_logprobs": [{"token": "2", "logprob": -(10**400)}]}]}}
                ]
            },
            "",
            "dialect",
        ),
        ({"usage": {"prompt_tokens": 10**400, "completion_tokens": 1}}, "", ""),
        ({"model": "half \ud83d"}, "", ""),
        (None, "Mon, 99999999999999999999 Jan 2026 00:00:00 GMT", "status 503"),
    ],
)
def test_numbers_and_texts_of_a_server_that_cannot_be_used_end_no_run(
    tmp_path: Path, body: dict[str, Any] | None, after: str, why: str
) -> None:
    top = [TOP, {"token": "2", "logprob": -20.0}]
    whole = {"model": "m", "choices": [{"logprobs": {"content": [{**TOP, "top_logprobs": top}]}}], "usage": {}} | (
        body or {}
    )
    whole["choices"][0] |= {"message": {"content": "1"}, "finish_reason": "length"}

    async def answer(request: web.Request) -> web.Response:
        if body is None:
            return web.Response(status=503, headers={"retry-after": after})
        return web.json_response(whole)

    async def use() -> Verdict:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        server = TestServer(app)
        await server.start_server()
        asker = HttpAsker(str(server.make_url("/v1")), "m")
        limits = Limits(deadline_s=2.0 if why else 30.0)
        store = JudgeStore(tmp_path / "judges.sqlite")
        judge = Judge(RUBRIC, asker, store, form=Form.TOKEN, limits=limits, prices=PRICES, first_wait_s=0.05)
        found = await judge.score(FACTS, Evidence.of_text("fact"))
        store.close()
        await server.close()
        return found

    found = asyncio.run(use())
    assert (found.value is None) == bool(why), found.reason
    assert why in found.reason


def test_half_of_a_surrogate_pair_in_a_reason_is_no_failure(tmp_path: Path) -> None:
    text = '{"reason": "good \\ud83d", "verdict": 4, "code": "c0de"}'
    assert read_reply(text, Form.JSON, Scale(1, 5), "c0de") == (4, "good ?")
    JudgeStore(tmp_path / "judges.sqlite").put(b"key", Stored("4", "good ?", "m"))


def test_no_more_calls_than_at_once_run_together(tmp_path: Path) -> None:
    server = ScriptedJudge(fault=lambda _: None)

    async def use(server: ScriptedJudge) -> None:
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=Limits(at_once=2))
        await asyncio.gather(*(judge.score(FACTS, Evidence.of_text(f"fact {n}")) for n in range(12)))

    asked(server, use)
    assert len(server.bodies) == 12
    assert server.most_running <= 2


def test_calls_keep_the_distance_of_per_minute(tmp_path: Path) -> None:
    async def use(server: ScriptedJudge) -> float:
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=Limits(per_minute=600))
        began = time.monotonic()
        await asyncio.gather(*(judge.score(FACTS, Evidence.of_text(f"fact {n}")) for n in range(5)))
        return time.monotonic() - began

    assert asked(ScriptedJudge(), use) >= 0.39


@pytest.mark.parametrize("limits", [Limits(at_once=1), Limits(per_minute=1)])
def test_the_wait_for_a_place_or_for_the_time_of_a_call_is_not_in_the_deadline(
    tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> float:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr("etude.rewards.judges.store.time", types.SimpleNamespace(time=loop.time))
        store = JudgeStore(tmp_path / "judges.sqlite")
        judge = Judge(RUBRIC, SlowAsker(30.0), store, limits=limits)
        found = await asyncio.gather(*(judge.score(FACTS, Evidence.of_text(f"fact {n}")) for n in range(16)))
        store.close()
        assert [one.value for one in found] == [1] * 16
        return loop.time()

    assert run_at_once(use()) > 3 * limits.deadline_s


PRICES = TokenPrices(input=10.0, cached_input=1.0, output=30.0)


def test_money_is_counted_and_a_spent_budget_makes_verdicts_unknown(tmp_path: Path) -> None:
    server = ScriptedJudge()

    async def use(server: ScriptedJudge) -> list[Verdict]:
        limits = Limits(at_once=4, budget=0.15)
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=limits, prices=PRICES)
        found = [await judge.score(FACTS, Evidence.of_text(f"fact {n}")) for n in range(40)]
        [account] = judge.store.accounts()
        assert account.calls == len(server.bodies)
        assert 0.0 < account.dollars <= 0.15
        assert account.unpriced == 0
        return found

    found = asked(server, use)
    unknown = [one for one in found if one.value is None]
    assert 0 < len(unknown) < 40
    assert all("dollars that are left of the budget of 0.15" in one.reason for one in unknown)


def test_a_call_for_one_token_reserves_one_token(tmp_path: Path) -> None:
    most = PRICES.cost(3_000, 0, 100)
    limits = Limits(budget=most)
    assert scored(ScriptedJudge(), tmp_path, limits=limits, prices=PRICES).value is None, "its answer may be long"
    assert scored(ScriptedJudge(), tmp_path, limits=limits, prices=PRICES, form=Form.TOKEN).value == 2


def test_a_call_reserves_a_token_a_byte_and_the_longest_answer_that_its_options_allow(tmp_path: Path) -> None:
    def known(num_input: int, num_output: int, **options: Any) -> bool:
        store, limits = tmp_path / f"{num_input}-{num_output}", Limits(budget=PRICES.cost(num_input, 0, num_output))
        return scored(ScriptedJudge(), store, limits=limits, prices=PRICES, options=options).value is not None

    server = ScriptedJudge()
    scored(server, tmp_path)
    size = sum(len(message["content"].encode()) for message in server.bodies[0]["messages"])
    assert known(size, MAX_TOKENS)
    assert not known(size - 1, MAX_TOKENS)
    assert known(size, 9_000, max_completion_tokens=9_000)
    assert not known(size, 8_999, max_completion_tokens=9_000)


def test_a_call_that_hangs_may_cost_and_keeps_its_reservation_and_a_refused_one_costs_nothing(tmp_path: Path) -> None:
    store = JudgeStore(tmp_path / "judges.sqlite")
    limits = Limits(budget=1.0)
    scored(ScriptedJudge(fault=lambda _: 400), tmp_path, limits=limits, prices=PRICES)
    assert store.accounts()[0].dollars == pytest.approx(0.0)
    limits = Limits(deadline_s=0.4, budget=1.0)
    scored(ScriptedJudge(fault=lambda _: "hang"), tmp_path, limits=limits, prices=PRICES)
    assert store.accounts()[0].dollars > 0.05


def test_the_cost_of_an_answer_without_counts_is_unknown_and_not_0(tmp_path: Path) -> None:
    assert scored(ScriptedJudge(usage=False), tmp_path, prices=PRICES).value == 2
    [account] = JudgeStore(tmp_path / "judges.sqlite").accounts()
    assert account.unpriced == 1


def test_what_is_only_reserved_is_told_apart_from_what_is_spent_also_in_a_file_of_an_earlier_version(
    tmp_path: Path,
) -> None:
    path = tmp_path / "judges.sqlite"
    JudgeStore(path).secret()
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.execute("ALTER TABLE judges DROP COLUMN reserved")
    store = JudgeStore(path)
    for spent in (0.2, None):
        assert store.reserve("tone", 0.5, 2.0) is None
        [account] = store.accounts()
        assert account.reserved == 0.5
        store.settle("tone", 0.5, spent)
    [account] = store.accounts()
    assert (account.dollars, account.reserved, account.unpriced) == (pytest.approx(0.7), 0.5, 1)
    assert store.reserve("tone", 1.5, 2.0) == pytest.approx(1.3)
    store.close()


def test_a_pair_is_asked_in_both_orders_and_contradictions_are_a_tie(tmp_path: Path) -> None:
    def compared(server: ScriptedJudge, first: str, second: str) -> Verdict:
        async def use(server: ScriptedJudge) -> Verdict:
            judge = judge_at(server, tmp_path / f"{len(first)}{len(second)}{server.prefers_first}.sqlite")
            return await judge.compare(FACTS, Evidence.of_text(first), Evidence.of_text(second))

        return asked(server, use)

    assert compared(ScriptedJudge(), work(4), work(2)).value == 1.0
    assert compared(ScriptedJudge(), work(1), work(2)).value == 0.0
    assert compared(ScriptedJudge(), work(2, filler=3), work(2)).value == 0.5
    biased = ScriptedJudge(prefers_first=1.0)
    assert compared(biased, work(5), work(1)).value == 0.5
    assert len(biased.bodies) == 2
    assert compared(biased, work(5), work(5)).value == 0.5
    assert len(biased.bodies) == 2, "the same work needs no call"


def test_a_ranking_does_not_depend_on_the_order_of_the_siblings(tmp_path: Path) -> None:
    texts = [work(n) for n in (3, 5, 1, 5, 2)]

    def ranked(texts: list[str], **other: Any) -> list[float]:
        async def use(server: ScriptedJudge) -> list[float]:
            judge = judge_at(server, tmp_path / f"{other}.sqlite")
            return [one.value for one in await judge.rank(FACTS, [Evidence.of_text(text) for text in texts])]

        return asked(ScriptedJudge(**other), use)

    assert ranked(texts) == pytest.approx([2 / 3, 1.0, 0.0, 1.0, 1 / 3])
    assert ranked(texts[::-1]) == pytest.approx([2 / 3, 1.0, 0.0, 1.0, 1 / 3][::-1])
    assert ranked(texts, prefers_first=1.0) == pytest.approx([0.5] * 5)


def test_noise_of_a_known_rate_is_noise_of_that_rate(tmp_path: Path) -> None:
    async def use(server: ScriptedJudge) -> int:
        judge = judge_at(server, tmp_path / "judges.sqlite", limits=Limits(at_once=16))
        works = [work(3, more=str(n)) for n in range(150)]
        found = await asyncio.gather(*(judge.score(FACTS, Evidence.of_text(one)) for one in works))
        return sum(one.value != 3 for one in found)

    assert 15 <= asked(ScriptedJudge(bias=honest(0.2)), use) <= 45
