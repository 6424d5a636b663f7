"""Signals as outcomes of a release: for the version that answered, once, at the present share; dollars per kept
change."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tests.served_answers import served_answer
from tests.unit.gateway.test_gateway import CHAT, text
from tests.unit.releases.played import begun
from tests.unit.signals.given import Clock, add, given, opened

from etude.evals.intervals import ratio
from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.prices import Prices, TokenPrices
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.records import Completion, CompletionRequest, Version, VersionSpan
from etude.releases import Arm, Outcome, Release, Releases
from etude.releases.assignment import MAX_AGE_S
from etude.releases.costs import cost_per_kept
from etude.releases.feedback import CostReader, outcomes_of
from etude.releases.router import ReleaseRouter
from etude.signals import FeedbackFile, FeedbackWriter
from etude.signals.join import GRACE_S
from etude.stores import MemoryStore
from etude.testing import ScriptedEngine


class Versioned:
    """An engine whose answers are of one version."""

    def __init__(self, version: Version) -> None:
        self.version, self.engine = version, ScriptedEngine([text("hello")] * 1000)

    async def complete(self, request: CompletionRequest) -> Completion:
        done = await self.engine.generate(request)
        spans = (VersionSpan(self.version, len(done.token_ids)),)
        return msgspec.structs.replace(done, spans=spans)


def kept_by_arm(releases: Releases, release: Release) -> Counter[tuple[str, float]]:
    rows = releases._database.values(release.number, release.share, 1e12, 1e12)
    return Counter((arm, mean) for metric, arm, mean in rows if metric == "kept")


def test_signals_of_users_count_once_for_the_version_that_answered_them(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store, shares=(50,))
    release = releases.newest()
    users = [f"user-{i}" for i in range(40)]
    arms = {user: releases.assign(user) for user in users}
    writer = FeedbackWriter(tmp_path / "f.sqlite")
    router = ReleaseRouter(tmp_path / "releases.sqlite", stable="m", canary="m-canary")

    async def work() -> None:
        config = GatewayConfig(port=0)
        models = [
            ServedModel(Versioned(version), CHAT, name=name, context_tokens=512, config=config)  # type: ignore[arg-type]
            for name, version in (("m", release.stable), ("m-canary", release.candidate))
        ]
        app = create_app(models, config=config, router=router, feedback=writer)
        async with serving(app, config=config) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            for user in users:
                body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
                headers = {"x-etude-user": user}
                answer = (await http.post("/chat/completions", json=body, headers=headers)).json()
                is_canary = arms[user] is Arm.CANARY
                assert answer["system_fingerprint"] == str(release.candidate if is_canary else release.stable)
                for name in ("kept", "unasked"):
                    signal = {"id": f"{user}-{name}", "response_id": answer["id"], "name": name, "value": is_canary}
                    assert (await http.post("/feedback", json=signal, headers=headers)).status_code == 200

    asyncio.run(work())
    assert writer.close(60)
    router.close()
    expected = Counter((arm.value, float(arm is Arm.CANARY)) for arm in arms.values())
    with FeedbackFile(tmp_path / "f.sqlite") as file:
        for new in (len(users), 0):
            signals = file.signals(since=releases.share_since(release))
            assert releases.observe(outcomes_of(signals, {"kept"}), now=1.0) == new
            assert kept_by_arm(releases, release) == expected
    releases.close()


def outcome(number: int, version: Version | str | None, answered: float | None = None) -> Outcome:
    told = None if version is None else str(version)
    return Outcome(id=f"{number}", subject=f"{number}", metric="kept", value=1.0, version=told, answered=answered)


def test_answers_of_a_third_version_or_of_an_earlier_share_do_not_count(tmp_path: Path) -> None:
    store = MemoryStore()
    releases = begun(tmp_path / "releases.sqlite", store, shares=(10, 50), share_s=0.0, subjects=0)
    _, decision = releases.advance(store, now=100.0)
    release = releases.newest()
    assert (release.share, decision is not None) == (50, True)
    releases.hold(reason="the weekend", now=150.0)
    releases.resume(reason="monday", now=200.0)
    release = releases.newest()
    assert (release.since, releases.share_since(release)) == (200.0, 100.0)  # a held canary keeps its share
    third = Version(9, "0a1b2c3d", "ab" * 32)
    sent = [
        outcome(0, release.candidate, 100.0 + MAX_AGE_S),
        outcome(1, release.stable, 120.0),
        outcome(2, third, 120.0),
        outcome(3, "", 120.0),
        outcome(4, release.candidate, 99.0),
        outcome(5, release.candidate, 100.0 + MAX_AGE_S / 2),  # it may have been routed by the share of before
        outcome(6, release.stable),
    ]
    assert releases.observe(sent, now=210.0) == 3
    assert kept_by_arm(releases, release) == Counter({("canary", 1.0): 1, ("stable", 1.0): 2})
    wrong = msgspec.structs.replace(outcome(7, release.candidate, 120.0), arm=Arm.STABLE)
    assert releases.observe([wrong], now=210.0) == 0
    releases.close()


WINDOW_S = 3600.0
PRICES = Prices(models={"policy": TokenPrices(input=2.0, cached_input=1.0, output=10.0)})  # per million tokens


class Product:
    """A canary at 50 % whose answers are captured and whose users send signals. `now` is after their windows."""

    def __init__(self, releases: Releases, folder: PrivacyFolder, file: FeedbackFile, clock: Clock) -> None:
        self.release, self.folder, self.file, self.clock = releases.newest(), folder, file, clock
        self.begin = clock.now
        self.ended = Clock(self.begin + WINDOW_S + GRACE_S + 60.0)

    def answer(self, user: str, version: Version, kept: float | None, *, index: int = 0, **changed: Any) -> str:
        """Capture an answer of 5 read tokens, 2 of them cached, and 3 sampled ones, or `changed`. Returns its id."""
        response_id = changed.pop("response_id", None) or self.file.ids.new("acme", user, "m", 2)
        cached = changed.pop("cached", 2)
        one = served_answer(user, said="yes", response_id=response_id, index=index, at=self.clock.now, **changed)
        done = msgspec.structs.replace(one.completion, spans=(VersionSpan(version, 3),), num_cached=cached)
        writer = CaptureWriter(self.folder.path)
        writer.offer(msgspec.structs.replace(one, completion=done))
        assert writer.close(60)
        if kept is not None:
            assert add(self.file, given(response_id, f"{response_id}{index}", value=kept, answer=index), user=user)
        self.clock.now += 1.0
        return str(response_id)

    def reader(self, prices: Prices = PRICES) -> CostReader:
        return CostReader(self.release, prices, since=self.begin, clock=self.ended)


@pytest.fixture
def product(tmp_path: Path) -> Iterator[Product]:
    clock = Clock(time.time() - 60.0)  # records expire by the true time
    releases = begun(tmp_path / "releases.sqlite", MemoryStore(), shares=(50,), window_s=WINDOW_S)
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.consent._clock = Clock(clock.now - 10)
        folder.consent.set(Subject.of("acme"), Level.METRICS)
        with opened(tmp_path / "f.sqlite", clock, privacy=folder) as file:
            yield Product(releases, folder, file, clock)
    releases.close()


ONE = (3 * 2.0 + 2 * 1.0 + 3 * 10.0) / 1e6  # dollars of an answer


def test_dollars_per_kept_change_are_those_of_all_answers_of_a_version_over_what_its_users_kept(
    product: Product,
) -> None:
    stable, candidate = product.release.stable, product.release.candidate
    for user, kept in (("bob", 1.0), ("bob", 0.0), ("eve", None), ("eve", 1.0), ("eve", 1.0)):
        product.answer(user, stable, kept)
    product.answer("sam", candidate, 1.0, summary_tokens=(100, 20))
    twice = product.answer("sam", candidate, 0.0)
    product.answer("sam", candidate, 0.0, index=1, response_id=twice)  # its prompt is paid once
    product.answer("old", Version(9, "0a1b2c3d", "cd" * 32), 1.0)
    reader = product.reader()
    costs = reader.read(product.folder, product.file)
    found, canary = costs[Arm.STABLE], costs[Arm.CANARY]
    expected = ratio([2 * ONE, 3 * ONE], [1.0, 2.0])
    assert (found.answers, found.subjects, found.kept) == (5, 2, 3.0)
    assert found.dollars == pytest.approx(5 * ONE)
    assert [found.value, found.low, found.high] == pytest.approx(
        [expected.value, max(0.0, expected.low), expected.high]
    )
    assert found.value == pytest.approx(5 * ONE / 3)
    assert (canary.answers, canary.subjects, canary.kept, canary.low) == (3, 1, 1.0, None)
    assert canary.dollars == pytest.approx(2 * ONE + (100 * 2.0 + 20 * 10.0 + 3 * 10.0) / 1e6)
    product.answer("zoe", stable, 0.0)
    assert reader.read(product.folder, product.file)[Arm.STABLE].answers == 6  # a second look reads what is new
    again = product.reader().read(product.folder, product.file)
    assert again[Arm.STABLE] == reader.read(product.folder, product.file)[Arm.STABLE]


def test_dollars_per_kept_change_are_unknown_and_not_0_without_a_price_a_count_or_a_kept_change(
    product: Product,
) -> None:
    product.answer("bob", product.release.stable, 1.0)
    product.answer("eve", product.release.candidate, 0.0)
    costs = product.reader().read(product.folder, product.file)
    assert (costs[Arm.STABLE].value, costs[Arm.CANARY].value) == (pytest.approx(ONE), None)
    assert costs[Arm.CANARY].dollars == pytest.approx(ONE)
    for prices in (
        Prices(),
        Prices(models={"policy": TokenPrices(input=2.0, output=10.0)}),
        Prices(models={"policy": TokenPrices(input=2.0, cached_input=1.0)}),
    ):
        found = product.reader(prices).read(product.folder, product.file)[Arm.STABLE]
        assert (found.answers, found.kept, found.dollars, found.value, found.high) == (1, 1.0, None, None, None)
    assert TokenPrices(input=2.0, cached_input=1.0, output=1.0).cost(5, None, 3) is None  # as in older records
    assert TokenPrices(input=1.0, cached_input=1.0, output=1.0).cost(5, None, 3) == pytest.approx(8e-6)


def test_only_settled_answers_count_of_users_who_allow_it(product: Product) -> None:
    product.answer("bob", product.release.stable, 1.0)
    product.answer("eve", product.release.stable, 1.0)
    early = CostReader(product.release, PRICES, since=product.begin, clock=Clock(product.begin + WINDOW_S))
    assert early.read(product.folder, product.file)[Arm.STABLE].answers == 0
    product.folder.consent._clock = product.clock
    product.folder.consent.set(Subject.of("acme", "eve"), Level.OFF)
    found = product.reader().read(product.folder, product.file)[Arm.STABLE]
    assert (found.answers, found.kept) == (1, 1.0)


def test_the_interval_of_dollars_per_kept_change_holds_the_truth() -> None:
    """Users differ in how much they ask and keep; a user's dollars and kept changes grow together."""
    draw, held, times = np.random.default_rng(0), 0, 1000
    for _ in range(times):
        asked = draw.integers(1, 11, 60)
        kept = draw.binomial(asked, draw.beta(2.0, 3.0, 60))
        found = cost_per_kept([*zip((0.001 * asked).tolist(), kept.astype(float).tolist(), strict=True)], answers=0)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.001 / 0.4 <= found.high
    assert math.isclose(held / times, 0.95, abs_tol=0.025)
