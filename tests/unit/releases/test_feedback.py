"""Signals as outcomes of a release: for the version that answered, once, at the present share."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import msgspec
from tests.unit.gateway.test_gateway import CHAT, text
from tests.unit.releases.played import begun

from etude.gateway import GatewayConfig, ServedModel, create_app, serving
from etude.records import Completion, CompletionRequest, Version, VersionSpan
from etude.releases import Arm, Outcome, Release, Releases
from etude.releases.assignment import MAX_AGE_S
from etude.releases.feedback import outcomes_of
from etude.releases.router import ReleaseRouter
from etude.signals import FeedbackFile, FeedbackWriter
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
