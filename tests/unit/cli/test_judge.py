"""``etude judge calibrate``, ``tune`` and ``accounts``, and changes of rewards that keep the audits."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.judge_server import ScriptedJudge, honest
from tests.unit.rewards.judges.test_calibration import rows

from etude import cli as etude
from etude.cli.rewards import changed_rewards
from etude.config import build
from etude.harness import ChatFormat, chat_template
from etude.harness.chat import SPECIAL_TOKENS
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, load_model
from etude.models.checkpoint import save_model
from etude.rewards.config import RewardsConfig
from etude.rewards.judges import Evidence, Form, Judge, JudgeStore, PolicyAsker, read_rubric
from etude.rewards.judges.calibration import AspectReport, Half, calibrate, read_labels
from etude.testing import EnginePolicy
from etude.testing.learning import make_version
from etude.training.tokenizer import train_tokenizer


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


@pytest.mark.parametrize("mode", ["pointwise", "ranking"])
def test_no_tolerance_is_offered_for_an_auditor_that_is_no_better_than_chance_and_few_labels_and_unknowns_are_told(
    config: Path, capsys: pytest.CaptureFixture[str], server: ScriptedJudge, mode: str
) -> None:
    given = [row | {"group": f"task {number // 4}"} for number, row in enumerate(rows(160))]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    config.write_text(config.read_text().replace("}", f', mode = "{mode}"}}'))
    server.bias = lambda text, draw: draw.randint(1, 5)
    words = ["judge", "calibrate", "labels.jsonl", "--config", "config.toml", "--term", "facts"]
    assert etude.main([*words, "--auditor", "auditor", "--json", "report.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "auditor does not order these works better than chance would (AUC of facts 0." in said
    assert "tolerance =" not in said
    assert "remark" not in said
    assert json.loads(Path("report.json").read_text())["tolerance"] is None
    if mode == "pointwise":
        some = [row for row in rows(30, seed=7)]
        Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        already = len(server.bodies)
        server.fault = lambda number: 400 if number <= already + 3 else None
        assert etude.main(words) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "in this half have a verdict, fewer than 30" in said
        assert re.search(r"remark: 3 of \d+ verdicts on facts are unknown, most often: judge: .*status 400", said)


def test_a_judge_is_calibrated_in_the_mode_of_its_term_and_only_with_an_auditor_of_that_mode(
    config: Path, capsys: pytest.CaptureFixture[str], server: ScriptedJudge
) -> None:
    given = [row | {"group": f"task {number // 4}"} for number, row in enumerate(rows(120))]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    words = ["judge", "calibrate", "labels.jsonl", "--config", "config.toml", "--term", "facts", "--auditor", "auditor"]
    plain = config.read_text()
    config.write_text(plain.replace("}", ', mode = "ranking"}'))
    assert etude.main([*words, "--json", "report.json"]) == 0
    assert "judge facts, ranking, version" in " ".join(capsys.readouterr().out.split())
    report = json.loads(Path("report.json").read_text())
    [aspect] = report["aspects"]
    assert aspect["num_labels"] % 6 == 0, "pairs of groups of four"
    assert aspect["prefers_first"] is not None
    assert aspect["auc"]["value"] > 0.9
    assert all("Put the works in order" in str(body["messages"]) for body in server.bodies)
    assert report["tolerance"] < 0.2
    config.write_text(plain.replace("}", ', mode = "ranking"}', 1))
    assert etude.main(words) == 2
    assert "the distance to the auditor cannot be measured" in capsys.readouterr().err


def test_an_account_shows_an_unknown_cost_as_unknown_and_reservations_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    store = JudgeStore(tmp_path / "judges.sqlite")
    calls = {"a": (0.0, [None]), "b": (0.5, [0.25, None]), "c": (0.5, [0.25]), "d": (0.5, [None])}
    for judge, (reserved, costs) in calls.items():
        for cost in costs:
            assert store.reserve(judge, reserved, 9.0) is None
            store.settle(judge, reserved, cost)
    store.close()
    assert etude.main(["judge", "accounts", str(tmp_path / "judges.sqlite")]) == 0
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    found = {row[1]: row[6:9] for row in rows if len(row) > 9}
    assert found["a"] == ["unknown", "0.0000", "1"]
    assert found["b"] == ["at least 0.2500", "0.5000", "1"]
    assert found["c"] == ["0.2500", "0.0000", "0"]
    assert found["d"] == ["unknown", "0.5000", "1"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, of a tokeniser that knows digits."""
    folder = tmp_path_factory.mktemp("start")
    words = ["solved", "red blue green 0 1", "==== data 0123456789: text ====", "==== end of data abcdef ===="]
    special: dict[str, Any] = {"special_tokens": SPECIAL_TOKENS, "chat_template": chat_template()}
    train_tokenizer(words * 20, folder / "tokenizer", vocab_size=300, **special)
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "num_experts": 4, "top_k": 2, "context_tokens": 128}
    model = ModelConfig(vocab_size=300, hidden_size=32, head_dim=16, expert_size=32, **sizes)
    save_model(Transformer(model, seed=0), folder / "start", dtype="f32", assets=folder / "tokenizer")
    return folder / "start"


TUNED = """
seed = 1
[mid_training]
num_tokens = 60_000
batch_tokens = 512
lr = 1e-2
warmup_steps = 5
[[rewards.terms]]
name = "solved"
weight = 0.0
kind = {kind = "judge", rubric = "red.toml", url = "http://h/v1", model = "m", form = "token", tuned = true, EVIDENCE}
"""


def colours(count: int) -> list[dict[str, Any]]:
    """Works whose label is whether red comes before blue."""
    draw, found = random.Random(0), []
    for number in range(count):
        order = draw.sample(["red", "blue"], 2)
        found.append(
            {"work": f"{' green' * draw.randint(0, 3)} {order[0]} {order[1]} {number}", "label": order[0] == "red"}
        )
    return [row | {"label": int(row["label"])} for row in found]


def test_a_tuned_checkpoint_judges_works_that_it_was_not_tuned_on(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one rank, in this process
    Path("red.toml").write_text('[[aspects]]\nname = "solved"\nquestion = "?"\nlowest = 0\nhighest = 1\n')
    Path("config.toml").write_text(TUNED.replace("EVIDENCE", 'evidence = ["files"]'))
    given = colours(300)
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    words = ["judge", "tune", "labels.jsonl", "--config", "config.toml", "--term", "solved", "--start", str(start)]
    assert etude.main([*words, "--out", "tuned"]) == 0
    assert not Path("tuned.corpus").exists()
    rubric = read_rubric("red.toml")
    labels = read_labels(Path("labels.jsonl"), rubric, lambda name: Evidence.of_text(name))

    async def use() -> AspectReport:
        config = EngineConfig(max_sequences=8, context_tokens=128)
        async with ReferenceEngine(load_model("tuned"), version=make_version(0), config=config) as engine:
            asker = PolicyAsker(EnginePolicy(engine), ChatFormat.load("tuned"), name="tuned")
            judge = Judge(rubric, asker, JudgeStore(Path("judges.sqlite")), form=Form.TOKEN, tuned=True)
            [found] = await calibrate(judge, [one for one in labels if one.half is Half.REPORT])
            judge.store.close()
            return found

    found = asyncio.run(use())
    assert found.num_unknown == 0
    assert found.auc is not None
    assert found.auc.low > 0.9


def test_a_work_is_not_cut_by_the_size_of_a_batch(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("red.toml").write_text('[[aspects]]\nname = "solved"\nquestion = "?"\nlowest = 0\nhighest = 1\n')
    small = TUNED.replace("EVIDENCE", 'evidence = ["files"]').replace("batch_tokens = 512", "batch_tokens = 16")
    Path("config.toml").write_text(small)
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in colours(4)))
    words = ["judge", "tune", "labels.jsonl", "--config", "config.toml", "--term", "solved", "--start", str(start)]
    assert etude.main([*words, "--out", "tuned"]) != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "the question about a label is too long for the model" in told
    assert "lower evidence_chars of the term solved (it is 24000)" in told


@pytest.mark.parametrize(("tokens", "hinted"), [(512, False), (4096, True)])
def test_tuning_says_how_often_it_shows_each_label_and_hints_where_that_is_often(
    tmp_path: Path,
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
    hinted: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # one rank, in this process
    Path("red.toml").write_text('[[aspects]]\nname = "solved"\nquestion = "?"\nlowest = 0\nhighest = 1\n')
    few = TUNED.replace("EVIDENCE", 'evidence = ["files"]').replace("60_000", str(tokens))
    Path("config.toml").write_text(few)
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in colours(24)))
    words = ["judge", "tune", "labels.jsonl", "--config", "config.toml", "--term", "solved", "--start", str(start)]
    assert etude.main([*words, "--out", "tuned"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"(\d+) of 24 labels, each ([\d.]+) times", said)
    assert found is not None
    assert 0.5 < float(found[2]) * int(found[1]) * 40 / tokens < 2.0, "a question has about 40 tokens"
    assert ("hint: a small model learns labels by heart" in said) is hinted


def test_a_judge_is_not_tuned_to_read_the_grade(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("red.toml").write_text('[[aspects]]\nname = "solved"\nquestion = "?"\nlowest = 0\nhighest = 1\n')
    Path("config.toml").write_text(TUNED.replace("EVIDENCE", 'evidence = ["files", "tests"]'))
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in colours(4)))
    words = ["judge", "tune", "labels.jsonl", "--config", "config.toml", "--term", "solved", "--start", str(start)]
    assert etude.main([*words, "--out", "tuned"]) == 2
    assert "the judge sees the grade, which is the label" in capsys.readouterr().err
    assert not Path("tuned").exists()


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
