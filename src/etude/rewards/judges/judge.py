"""A judge: a rubric, a model that is asked, and the limits of asking. Without a verdict a value is unknown, not 0.

A question is answered from the store if it was answered before. Otherwise it waits for a free place, is asked, and
asked again after failures that may pass, until its deadline. The deadline begins when the question has a place: a slow
judge with many questions loses none. If a question ends without a verdict at its deadline, and no other one had a
verdict meanwhile, the judge is silent, and the questions that wait for a place end, too. Calls of one process with the
same question share one call."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude import progress
from etude.errors import ConfigError
from etude.prices import UNKNOWN, TokenPrices
from etude.rewards.judges.asking import Asker, NoReply, Reply
from etude.rewards.judges.evidence import Evidence
from etude.rewards.judges.questions import FIRST, TIE, WORDING, Question, QuestionMaker
from etude.rewards.judges.rubrics import Aspect, Rubric
from etude.rewards.judges.store import JudgeStore, Stored
from etude.rewards.judges.verdicts import Form, NoVerdict, read_reply

MAX_NONSENSE = 3
"""After this many replies without a verdict to one question, its value is unknown."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0


@dataclass(frozen=True)
class Limits:
    """Limits of a judge.

    - `at_once`: the most questions that are asked at the same time in one process; others wait for a place.
    - `per_minute`: the most calls per minute of all processes that share the store; None: no limit except the server's.
    - `deadline_s`: the most seconds for one question, including all its tries. They begin when the question has one of
      the `at_once` places, and do not run while it waits for its turn by `per_minute`.
    - `budget`: dollars that all calls on `account` may cost; None: no limit.
    - `max_chars`: the most characters of evidence in one question."""

    at_once: int = 8
    per_minute: int | None = None
    deadline_s: float = 120.0
    budget: float | None = None
    max_chars: int = 24_000


@dataclass(frozen=True)
class Verdict:
    """A judge's answer to one question, or the reason why there is none.

    `value`: the verdict, such as a score; None if it is unknown. `reason`: the judge's reason, or why there is no
    verdict. `retry`: whether an unknown verdict may be known later. `cached`: whether it was read from the store."""

    value: Any
    reason: str = ""
    retry: bool = False
    cached: bool = False


class _Unknown(Exception):
    def __init__(self, why: str, *, retry: bool) -> None:
        super().__init__(why)
        self.verdict = Verdict(None, f"judge: {why}", retry=retry)


@dataclass
class Judge:
    """Asks a model about the aspects of a rubric. `version` changes with everything that may change a verdict.

    `account`: the judge's name in the store, under which its costs are recorded. `prices`: of the model's tokens.
    `hide`: names that are replaced in the evidence. `first_wait_s`: seconds before a second try; the wait doubles with
    each further try. `tuned`: whether the model was trained on the questions of this judge (`tuning`).

    Raises `ConfigError` if `form` does not fit the rubric or `tuned` (`check_form`)."""

    rubric: Rubric
    asker: Asker
    store: JudgeStore
    form: Form = Form.JSON
    limits: Limits = field(default_factory=Limits)
    hide: tuple[str, ...] = ()
    prices: TokenPrices = UNKNOWN
    account: str = "judge"
    first_wait_s: float = _FIRST_WAIT_S
    tuned: bool = False
    _pending: dict[bytes, asyncio.Task[Verdict]] = field(default_factory=dict, init=False, repr=False)
    _places: _Places | None = field(default=None, init=False, repr=False)
    _maker: QuestionMaker | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_form(self.form, self.rubric, tuned=self.tuned)
        asked = [self.rubric.digest(aspect) for aspect in self.rubric.aspects]
        parts = (WORDING, self.asker.identity, self.form, self.limits.max_chars, self.hide, self.tuned, asked)
        self.version = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    async def score(self, aspect: Aspect, work: Evidence) -> Verdict:
        """Ask for the score of a work.

        The verdict's value is an integer on the aspect's scale, with `Form.TOKEN` a float; None without a verdict."""
        maker = await self._question_maker()
        return await self._known_or_asked(maker.about_one(aspect, work), self._key("one", aspect, [work]))

    async def compare(self, aspect: Aspect, first: Evidence, second: Evidence) -> Verdict:
        """Ask twice which of two works is better, once in each order.

        The verdict's value is 1.0 if the first work is better both times, 0.0 if the second is, and 0.5 if the answers
        contradict each other or say that both are equal; None without a verdict. Works with equal evidence are not
        asked about and get 0.5."""
        if first.digest == second.digest:
            return Verdict(0.5, "both have the same evidence")
        answers = await self.in_both_orders(aspect, first, second)
        for answer in answers:
            if answer.value is None:
                return answer
        ahead = [0.5 if answer.value == TIE else float(answer.value == FIRST) for answer in answers]
        reason = answers[0].reason if ahead[0] != ahead[1] else f"both orders say {answers[0].value}: undecided"
        return Verdict((ahead[0] + 1.0 - ahead[1]) / 2, reason)

    async def in_both_orders(self, aspect: Aspect, first: Evidence, second: Evidence) -> list[Verdict]:
        """Ask which of two works is better, once in each order, and return both verdicts.

        The value of a verdict is FIRST, SECOND or TIE, and refers to the order in which the question showed the works.
        So in the second verdict, FIRST means the argument `second`."""
        maker = await self._question_maker()
        orders = [(first, second), (second, first)]
        return await asyncio.gather(
            *(self._known_or_asked(maker.about_two(aspect, *one), self._key("two", aspect, one)) for one in orders)
        )

    async def rank(self, aspect: Aspect, works: Sequence[Evidence]) -> list[Verdict]:
        """Ask twice for the order of all works, in one order of presentation and its reverse.

        Returns one verdict for each work. Its value is 1.0 for the best work and 0.0 for the worst, from the mean of
        the work's two places. The order of `works` does not matter, and works with equal evidence share a place. With
        one work the value is 0.5."""
        if len({work.digest for work in works}) == 1:
            return [Verdict(0.5, "all have the same evidence") for _ in works]
        shown, answers = zip(*await self.in_two_orders(aspect, works), strict=True)
        for answer in answers:
            if answer.value is None:
                return [answer for _ in works]
        places: dict[str, float] = {}
        for order, answer in zip(shown, answers, strict=True):
            for place, number in enumerate(answer.value):
                digest = order[number - 1].digest
                places[digest] = places.get(digest, 0.0) + place / 2
        last = len(places) - 1
        return [
            Verdict(1.0 - places[work.digest] / last, f"place {places[work.digest] + 1:g} of {len(places)}")
            for work in works
        ]

    async def in_two_orders(self, aspect: Aspect, works: Sequence[Evidence]) -> list[tuple[list[Evidence], Verdict]]:
        """Ask twice for the order of all works, in one order of presentation and its reverse.

        Works with equal evidence are shown once. Returns for each presentation the works as they were shown, and the
        verdict, whose value has the numbers of the works from 1, the best first."""
        order = [work for _, work in sorted({work.digest: work for work in works}.items())]
        maker, shown = await self._question_maker(), [order, order[::-1]]
        answers = await asyncio.gather(
            *(self._known_or_asked(maker.about_all(aspect, one), self._key("all", aspect, one)) for one in shown)
        )
        return list(zip(shown, answers, strict=True))

    def _key(self, what: str, aspect: Aspect, works: Sequence[Evidence]) -> bytes:
        parts = (what, self.version, self.rubric.digest(aspect), [work.digest for work in works])
        return hashlib.sha256(json.dumps(parts).encode()).digest()

    async def _question_maker(self) -> QuestionMaker:
        if self._maker is None:
            secret = await asyncio.to_thread(self.store.secret)
            self._maker = QuestionMaker(self.rubric, self.form, self.limits.max_chars, self.hide, secret, self.tuned)
        return self._maker

    async def _known_or_asked(self, question: Question, key: bytes) -> Verdict:
        if key not in self._pending:
            task = asyncio.create_task(self._answered(question, key), name=f"judge {self.account}")
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
        return await asyncio.shield(self._pending[key])

    async def _answered(self, question: Question, key: bytes) -> Verdict:
        found = await asyncio.to_thread(self.store.get, self.account, key)
        if found is not None:
            value = question.domain.read(json.loads(found.verdict))
            return Verdict(value, found.reason, cached=True)
        try:
            return await self._asked_in_time(question, key)
        except _Unknown as unknown:
            await asyncio.to_thread(self.store.count, self.account, unknown.verdict.reason)
            return unknown.verdict

    async def _asked_in_time(self, question: Question, key: bytes) -> Verdict:
        places, deadline_s = self._of_this_loop(), self.limits.deadline_s
        try:
            async with places.place():
                began, waits = places.loop.time(), _Waits(asyncio.timeout(deadline_s))
                try:
                    async with waits.deadline:
                        return await self._asked(question, key, waits)
                except TimeoutError:
                    if places.heard_at < began:
                        places.give_up()
                    why = f"no verdict within {deadline_s:g} s: it waited for {waits.for_what}"
                    raise _Unknown(why + (f"; before, {waits.failed}" if waits.failed else ""), retry=True) from None
        except _Silent:
            why = f"no question had a verdict within {deadline_s:g} s, and this one waited for a free place"
            raise _Unknown(why, retry=True) from None
        finally:
            progress.tick()

    def _of_this_loop(self) -> _Places:
        loop = asyncio.get_running_loop()
        if self._places is None or self._places.loop is not loop:
            self._places = _Places(loop, asyncio.Semaphore(self.limits.at_once))
        return self._places

    async def _asked(self, question: Question, key: bytes, waits: _Waits) -> Verdict:
        nonsense, wait_s, places = 0, self.first_wait_s, self._of_this_loop()
        while True:
            reply, why, after_s = await self._tried(question, waits, places)
            if reply is not None:
                try:
                    value, reason = read_reply(
                        reply.text, question.form, question.domain, question.code, reply.likeliest
                    )
                    await self._check_served(reply)
                    row = Stored(json.dumps(value), reason, reply.model)
                    await asyncio.to_thread(self.store.put, key, row)
                    await asyncio.to_thread(self.store.count, self.account)
                    places.heard_at = places.loop.time()
                    return Verdict(value, reason)
                except NoVerdict as error:
                    nonsense, why = nonsense + 1, str(error)
                    if nonsense == MAX_NONSENSE:
                        raise _Unknown(f"{nonsense} replies without a verdict: {why}", retry=False) from None
            waits.failed = why
            waits.for_what = "the time of another try"
            await asyncio.sleep(max(after_s or 0.0, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _tried(
        self, question: Question, waits: _Waits, places: _Places
    ) -> tuple[Reply | None, str, float | None]:
        """Ask once, and return the reply; or None, why there is none, and how long the server asks to wait.

        Raises `_Unknown` if there is no use in another try."""
        now = places.loop.time
        while (pause_s := places.paused_until - now()) > 0:  # what the server asked for counts for all calls
            waits.for_what = "the server's rate limit"
            await asyncio.sleep(pause_s)
        if self.limits.per_minute is not None:
            waits.for_what = "its turn by per_minute"
            await self._turn(self.limits.per_minute, waits)
        reserved = await self._reserved(question)
        spent: float | None = None
        try:
            waits.for_what = "the judge's answer"
            reply = await self.asker.ask(question)
            spent = self._cost(reply)
            return reply, "", None
        except NoReply as failed:
            spent = 0.0 if not failed.charged else self._cost(failed.reply) if failed.reply else None
            if failed.after_s:
                places.paused_until = max(places.paused_until, now() + failed.after_s)
            if not failed.retry:
                raise _Unknown(str(failed), retry=False) from None
            return None, str(failed), failed.after_s
        finally:
            await asyncio.shield(asyncio.to_thread(self.store.settle, self.account, reserved, spent))

    async def _turn(self, per_minute: int, waits: _Waits) -> None:
        """Wait for the time of the next call. A time that is further away than the deadline is not reserved yet."""
        turn, most_s = self.store.turn, self.limits.deadline_s
        while (wait_s := await asyncio.to_thread(turn, self.account, per_minute, most_s)) is None:
            await waits.pass_time(60.0 / per_minute)  # other processes reserve times, too
        await waits.pass_time(wait_s)

    async def _reserved(self, question: Question) -> float:
        """Reserve what a call may cost at most: a token has one byte at least. Raises `_Unknown`."""
        num_input = len((question.system + question.user).encode())
        most = self.prices.cost(num_input, 0, self.asker.max_output(question.form))
        if self.limits.budget is None or most is None:
            return 0.0
        left = await asyncio.to_thread(self.store.reserve, self.account, most, self.limits.budget)
        if left is not None:
            budget = f"the {left:.3g} dollars that are left of the budget of {self.limits.budget:g}"
            raise _Unknown(f"one call may cost up to ${most:.3g}, more than {budget}", retry=False)
        return most

    def _cost(self, reply: Reply) -> float | None:
        if reply.num_input is None or reply.num_output is None:
            return None
        return self.prices.cost(reply.num_input, reply.num_cached or 0, reply.num_output)

    async def _check_served(self, reply: Reply) -> None:
        """Raise `_Unknown` if another model answered than at first: its verdicts cannot be compared with those."""
        if reply.model:
            first = await asyncio.to_thread(self.store.served, self.account, reply.model)
            if first != reply.model:
                why = f"{reply.model} answered, and {first} before: name one version in `model`"
                raise _Unknown(why, retry=True)


def check_form(form: Form, rubric: Rubric, *, tuned: bool) -> None:
    """Raise `ConfigError` if a rubric cannot be judged with this form of answers, or `tuned` does not fit the form."""
    if form is not Form.TOKEN:
        if tuned:
            facts = f"form is '{form}', and a tuned judge was trained to answer with one token"
            raise ConfigError("tuned = true needs form = 'token'", facts, hint="set form = 'token', or tuned = false")
        return
    for aspect in rubric.aspects:
        if aspect.lowest < 0 or aspect.highest > 9:
            facts = f"the scale of aspect {aspect.name!r} is {aspect.lowest} to {aspect.highest}"
            raise ConfigError("form = 'token' needs scores of one digit", facts, hint="use a scale within 0 to 9")


@dataclass
class _Waits:
    """The deadline of a question, what the question waits for, and its last failure."""

    deadline: asyncio.Timeout
    for_what: str = "the judge's answer"
    failed: str = ""

    async def pass_time(self, seconds: float) -> None:
        """Wait, and move the deadline by the same time."""
        when = self.deadline.when()
        assert when is not None, "a question has a deadline"
        self.deadline.reschedule(when + seconds)
        await asyncio.sleep(seconds)


class _Silent(Exception):
    """Raised in questions that wait for a place while the judge gives no verdict to any question."""


@dataclass
class _Places:
    """The places of a judge in one event loop, and what the questions that have one know of the judge.

    `heard_at`: when a question had a verdict last; `paused_until`: until when the server asked not to be called (both
    the loop's clock)."""

    loop: asyncio.AbstractEventLoop
    free: asyncio.Semaphore
    heard_at: float = -math.inf
    paused_until: float = 0.0
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it until the end of the block. Raises `_Silent` after `give_up`."""
        try:
            async with asyncio.timeout(None) as waiting:
                self._waiting.add(waiting)
                await self.free.acquire()
        except TimeoutError:
            raise _Silent from None
        finally:
            self._waiting.discard(waiting)
        try:
            yield
        finally:
            self.free.release()

    def give_up(self) -> None:
        """End the waits of all questions that have no place."""
        waiting, self._waiting = self._waiting, set()
        for one in waiting:
            one.reschedule(self.loop.time())
