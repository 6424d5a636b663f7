"""``etude judge calibrate`` and ``accounts``, and changes of rewards that keep the audits."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.judge_server import ScriptedJudge, honest
from tests.unit.rewards.judges.test_calibration import rows

from etude import cli as etude
from etude.cli.rewards import changed_rewards
from etude.config import build
from etude.rewards.config import RewardsConfig


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    """A scripted judge in a thread."""
    judge, ready, loops = ScriptedJudge(bias=honest(0.1)), threading.Event(), list[asyncio.AbstractEventLoop]()
    over = asyncio.Event()

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with judge.serve():
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    yield judge
    loops[0].call_soon_threadsafe(over.set)
    thread.join(20)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ScriptedJudge) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    terms = [
        f"""[[rewards.terms]]
name = "{name}"
weight = {weight}
kind = {{kind = "judge", rubric = "facts.toml", url = "{server.url}/v1", model = "{name}"}}
"""
        for name, weight in (("facts", 0.5), ("auditor", 0.0))
    ]
    (tmp_path / "config.toml").write_text("\n".join(terms))
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(60)))
    return tmp_path / "config.toml"


def test_a_judge_of_a_config_is_calibrated_on_one_half_and_its_account_is_shown(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["judge", "calibrate", "labels.jsonl", "--config", "config.toml", "--term", "facts"]
    assert etude.main([*words, "--auditor", "auditor", "--json", "report.json"]) == 0
    said = capsys.readouterr().out
    assert "half report" in said
    assert "tolerance = " in said
    report = json.loads(Path("report.json").read_text())
    assert report["aspects"][0]["kappa"]["value"] > 0.8
    assert 10 < report["aspects"][0]["num_labels"] < 50
    assert etude.main([*words, "--half", "tune"]) == 0
    assert "these labels are for tuning" in capsys.readouterr().out
    assert etude.main(["judge", "accounts"]) == 0
    assert "facts by facts" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--term", "fact"], "did you mean 'facts'"),
        (["--term", "facts", "--half", "both"], "unknown --half 'both'"),
    ],
)
def test_a_judge_that_the_config_does_not_have_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    try:
        code = etude.main(["judge", "calibrate", "labels.jsonl", "--config", "config.toml", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert named in capsys.readouterr().err


def test_a_change_of_a_term_keeps_the_audits() -> None:
    plain = {"kind": "examples.plugins.rewards:FewTurns"}
    terms = [{"name": "a", **plain}, {"name": "b", "weight": 0.0, **plain}]
    rewards = build(RewardsConfig, {"terms": terms, "audits": [{"term": "a", "by": "b", "tolerance": 0.1}]})
    changed = changed_rewards(rewards, ["a.weight=0.25"])
    assert changed.terms[0].weight == 0.25
    assert changed.audits == rewards.audits
