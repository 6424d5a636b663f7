"""The whole circle, tiny, through the command line, and every command on what it left."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from etude import cli as etude
from etude.errors import Exit
from etude.evals.records import read_record
from etude.run import RunFolder
from etude.stores import open_store
from etude.weights.chain.inspect import find
from etude.weights.chain.manifest import read_pointer

TINY = """seed = 1

[model]
vocab_size = 320
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
expert_size = 32
num_experts = 4
top_k = 2
context_tokens = 384

[tasks]
files = 1

[corpus]
num_demonstrations = 60
num_code_documents = 40
library_chars = 4000

[mid_training]
num_tokens = 20_000
batch_tokens = 1024
warmup_steps = 2

[harness]
max_turns = 6
context_tokens = 384

[engine]
max_sequences = 16
context_tokens = 384

[experience]
groups_per_step = 2
group_size = 4
max_lag = 1

[rl]
steps = 2
checkpoint_every = 1

[evals]
heldout_tasks = 4
during_tasks = 2
baseline_tasks = 4
every = 1
"""
pytestmark = pytest.mark.timeout(1800)
PHASES = ["corpus", "mid-training", "eval-before", "rl", "eval-after", "report"]


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory, cli_in: Callable[[Path], Any]) -> Path:
    """A finished run, from nothing, in ``<cwd>/runs/tiny``."""
    cwd = tmp_path_factory.mktemp("circle")
    (cwd / "tiny.toml").write_text(TINY)
    done = cli_in(cwd)("run", "tiny.toml", "--name", "tiny")
    assert "held-out solve rate" in done.stdout, done.stderr
    assert done.returncode == Exit.FAILED, "so small a model solves nothing, and the run says so"
    assert "error: the run had nothing to learn from: in none of 2 steps did a rollout have an advantage" in done.stderr
    assert "etude serve runs/tiny" in done.stdout
    return cwd / "runs" / "tiny"


@pytest.fixture
def say(circle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command on the run, in this process: what it printed. Fails when it did not end with `code`."""
    monkeypatch.chdir(circle.parent.parent)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str, code: int = 0) -> str:
        capsys.readouterr()
        found = etude.main(args)
        out, err = capsys.readouterr()
        assert found == code, err
        return out + err

    return run


def test_every_phase_ends_and_leaves_what_the_format_names(circle: Path) -> None:
    assert [p["phase"] for p in RunFolder.open(circle).phases()] == PHASES
    for name in ("config.toml", "ledger.sqlite", "report.html", "evals/before.parquet", "evals/after.parquet"):
        assert (circle / name).stat().st_size, name
    for name in ("checkpoints/mid", "checkpoints/step-000002", "checkpoints/final", "weights/pointers", "tokenizer"):
        assert (circle / name).is_dir(), name
    assert len(list((circle / "traces").glob("batch-*.parquet"))) == 2
    rows = pq.read_table(circle / "traces" / "batch-000002.parquet", columns=["token_ids", "routes"]).to_pylist()
    assert any(row["token_ids"] for row in rows)
    assert not any(row["routes"] for row in rows), "in exact mode nobody needs them"


def test_the_summary_holds_every_documented_key(circle: Path) -> None:
    summary = json.loads((circle / "summary.json").read_text())
    assert summary["finished"] is True
    assert {
        "format", "run_id", "etude", "host", "heldout", "baselines", "wall_s", "cpu_s", "idle", "lag", "weights",
        "parity", "invalid", "rollouts", "rl", "peak_memory_bytes",
    } <= set(summary)  # fmt: skip
    for when in ("before", "after"):
        assert {"rate", "low", "high", "num_tasks", "solved", "best_of_k", "turns_mean"} <= set(
            summary["heldout"][when]
        )
        assert summary["heldout"][when]["num_tasks"] == 4
    assert summary["heldout"]["during"][0]["step"] == 1
    assert summary["baselines"]["oracle"] == 1.0
    assert summary["baselines"]["random"] < 1.0
    assert {"total", *PHASES[:-1]} <= set(summary["wall_s"])
    assert {"learner", "engines"} == set(summary["idle"])
    assert set(summary["lag"]["histogram"]) <= {"0", "1"}
    assert summary["weights"]["num_publishes"] == 3
    assert 0 <= summary["parity"]["probe_ratio_max"] <= 1e-4
    assert summary["rl"]["steps"] == 2
    assert summary["peak_memory_bytes"] > 0


def test_the_report_is_one_page_that_loads_nothing(circle: Path) -> None:
    page = (circle / "report.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    for loading in ('src="http', "src='http", "@import", '<link rel="stylesheet"'):
        assert loading not in page


def test_status_says_that_the_run_does_not_run(say: Callable[..., str]) -> None:
    assert "runs/tiny: ended" in say("status")
    assert "not running" in say("stop", "tiny", code=1)


def test_rollouts_are_listed_and_shown(say: Callable[..., str]) -> None:
    listed = say("rollouts", "list", "--limit", "100")
    assert "g000000.0" in listed
    assert "g000003.3" in listed
    shown = say("rollouts", "show", "g000003.0")
    assert "admitted" in shown
    assert "running -> graded" in shown
    first = say("rollouts", "show", "g000000.0")
    assert "batched -> " in first
    assert "[user]" in first, "its record is pruned, its trace is not"


def test_rollouts_of_evaluations_are_listed_and_shown(say: Callable[..., str]) -> None:
    assert "heldout000003.0" in say("rollouts", "list", "--eval", "after")
    shown = say("rollouts", "show", "heldout000003.0")
    assert "evaluation before · " in shown
    assert "evaluation after · " in shown
    assert shown.count("[user]") >= 2
    assert "list them" in say("rollouts", "show", "heldout000099.0", code=2)
    assert "did you mean 'after'" in say("rollouts", "list", "--eval", "aftre", code=2)


def test_an_evaluation_names_what_it_evaluated(circle: Path, say: Callable[..., str]) -> None:
    told = say("eval", "own", "--checkpoint", "tiny", "--tasks", "2", "--out", "out")
    said, _ = json.JSONDecoder().raw_decode(told)  # what is told beside it follows
    assert said["result"]["step"] == 2
    assert said["version"].startswith("v000002-")
    assert said["model"].endswith("checkpoints/final")
    assert said["result"]["prompt_mean"] > 0
    assert said["result"]["dollars"] is None  # no price is known
    assert "tiny@final" in say("leaderboard", "out")


@pytest.mark.slow
def test_training_seeds_of_a_recipe_are_evaluated_together(circle: Path, say: Callable[..., str]) -> None:
    shutil.copytree(circle, other := circle.parent / "other")
    both = ("--checkpoint", "tiny", "--checkpoint", "other", "--beside", "--name", "both")
    told = say("eval", "own", *both, "--tasks", "2", "--out", "seeds")
    shutil.rmtree(other)
    said, _ = json.JSONDecoder().raw_decode(told)
    assert list(said["seeds"]["result"]["by_seed"]) == ["tiny@final", "other@final"]
    assert said["seeds"]["result"]["gain"] is not None
    assert said["seeds"]["result"]["general_rise"][0] == pytest.approx(
        said["results"][0]["general_bits_per_byte"] - said["results"][1]["general_bits_per_byte"]
    ), "both seeds are the same model"
    assert [one["label"] for one in said["results"]] == [
        "tiny@final",
        "tiny@untrained",
        "other@final",
        "other@untrained",
    ]
    assert "own, both: 0.000" in say("leaderboard", "seeds")
    assert "2 models have the same file" in say("eval", "own", "--checkpoint", "tiny", "--checkpoint", "tiny", code=2)


def test_a_script_plays_a_suite_without_a_checkpoint(say: Callable[..., str]) -> None:
    Path("prices.toml").write_text("machine_second = 1.0\n[models.policy]\ninput = 1.0\noutput = 1.0\n")
    oracle = ("--baseline", "oracle", "--config", "tiny.toml", "--prices", "prices.toml")
    told = say("eval", "own", *oracle, "--tasks", "3", "--out", "scripts")
    said, _ = json.JSONDecoder().raw_decode(told)
    assert (said["label"], said["result"]["rate"], said["general_bits_per_byte"]) == ("oracle", 1.0, None)
    assert said["result"]["dollars"] is None, "a script does not pay the price of the model's tokens"


def test_a_suite_of_tasks_that_a_run_was_trained_on_is_refused(say: Callable[..., str]) -> None:
    assert "that tiny was trained on" in say("eval", "own", "--checkpoint", "tiny", "--split", "train", code=2)


def test_the_weights_are_listed_compared_and_verified(say: Callable[..., str]) -> None:
    log = say("weights", "log")
    assert "v000000" in log
    assert "v000002" in log
    assert "model.embed_tokens.weight" in say("weights", "diff", "0", "2")
    assert "3 versions" in say("weights", "verify")


def test_the_audit_finds_nothing_lost_and_nothing_twice(say: Callable[..., str]) -> None:
    said = say("ledger", "audit")
    assert said.startswith("0 lost, 0 trained twice, 0 slots leaked; 16 of")
    assert "by 2 steps" in said


def test_damage_is_named_by_the_audit_and_a_pointer_is_repaired(
    circle: Path, say: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(circle, tmp_path / "copy")
    copy = str(tmp_path / "copy")
    trace, pointer = tmp_path / "copy/traces/batch-000002.parquet", tmp_path / "copy/weights/pointers/policy"
    whole = trace.read_bytes()
    trace.write_bytes(b"garbage")
    assert say("ledger", "audit", copy, code=1).startswith("failed: 1 without evidence")
    trace.write_bytes(whole)
    head = pointer.read_bytes()
    pointer.write_bytes(head[:40])
    for command in (["weights", "log", copy], ["ledger", "audit", copy], ["serve", copy]):
        assert "etude weights repair" in say(*command, code=1)
    assert "v000002" in say("weights", "repair", copy)
    before, after = read_pointer(head), read_pointer(pointer.read_bytes())
    assert (after.head, after.generation) == (before.head, before.generation + 1)  # followers see that it was set anew
    assert "nothing to repair" in say("weights", "repair", copy)
    assert say("ledger", "audit", copy).startswith("0 lost")


def test_a_run_is_compared_with_itself_and_reported_again(circle: Path, say: Callable[..., str]) -> None:
    assert say("compare", "tiny", "tiny").strip()
    (circle / "report.html").unlink()
    assert "report.html" in say("report", "tiny")
    assert (circle / "report.html").is_file()


def test_transformers_agrees_with_the_exported_checkpoint(
    circle: Path, tmp_path: Path, say: Callable[..., str]
) -> None:
    import torch
    import transformers

    from etude.models.checkpoint import load_model

    say("export", "runs/tiny", str(tmp_path / "final"), "--dtype", "f32")
    say("export", "tiny@2", str(tmp_path / "two"), "--dtype", "f32")
    tokens = torch.arange(3, 40)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        for name in ("final", "two"):  # the run's result is the version of its last step
            assert torch.allclose(load_model(tmp_path / name).eval().run(tokens).logits, expected, atol=1e-4)
    said = transformers.AutoTokenizer.from_pretrained(tmp_path / "final")
    assert said.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|user|>hi")


def test_resuming_a_finished_run_does_nothing(circle: Path, cli_in: Callable[[Path], Any]) -> None:
    before = (circle / "phases.json").read_bytes()
    pointers = {p: p.read_bytes() for p in (circle / "weights" / "pointers").rglob("*") if p.is_file()}
    done = cli_in(circle.parent.parent)("run", "tiny.toml", "--resume", "tiny")
    assert done.returncode == Exit.FAILED, done.stderr  # as when it ended
    assert done.stderr.startswith("error: the run had nothing to learn from: "), done.stderr
    assert (circle / "phases.json").read_bytes() == before
    assert {p: p.read_bytes() for p in pointers} == pointers


@pytest.fixture
def served(circle: Path, cli_in: Callable[[Path], Any]) -> Iterator[str]:
    """The base URL of ``etude serve`` on the run."""
    server = cli_in(circle.parent.parent).start("serve", "runs/tiny", "--port", "0", "--key", "k3y")
    try:
        line = server.stdout.readline()
        assert "serving tiny at http://127.0.0.1:" in line, line + server.stderr.read()
        yield line.split(" at ")[1].split()[0]
        server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0
    finally:
        server.kill()
        server.communicate()


def test_the_openai_client_talks_to_the_result(served: str) -> None:
    import openai

    tool = {
        "type": "function",
        "function": {
            "name": "cat",
            "description": "Show a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    base = served if served.endswith("/v1") else f"{served}/v1"
    with (
        openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with openai.OpenAI(base_url=base, api_key="k3y", max_retries=0) as client:
        assert [m.id for m in client.models.list().data] == ["tiny"]
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "fix the failing test"}],
            "tools": [tool],
            "max_tokens": 12,
            "seed": 7,
        }
        whole = client.chat.completions.create(**asked)
        assert whole.usage.completion_tokens > 0
        message = whole.choices[0].message
        assert message.content is not None or message.tool_calls
        parts = list(client.chat.completions.create(**asked, stream=True))
        streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert streamed == (message.content or "")
        text = list(client.completions.create(model="tiny", prompt="def f", max_tokens=30, seed=7, stream=True))
        again = client.completions.create(model="tiny", prompt="def f", max_tokens=30, seed=7)
        assert "".join(p.choices[0].text for p in text) == again.choices[0].text
        with pytest.raises(openai.BadRequestError, match="context"):
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "a b " * 2000}], max_tokens=4
            )


def test_a_step_and_a_branch_of_a_run_are_served_by_name(circle: Path, cli_in: Callable[[Path], Any]) -> None:
    import openai

    command = cli_in(circle.parent.parent)
    store = open_store(str(circle / "weights"), readonly=True)
    first, last = (find(store, step).version for step in ("1", "2"))
    assert command("weights", "point", "runs/tiny", str(first), "--branch", "trial").returncode == 0
    unknown = command("serve", "runs/tiny@trail", "--port", "0")
    assert unknown.returncode == Exit.BAD_INPUT, unknown.stderr
    assert "has no branch 'trail'" in unknown.stderr
    assert "hint: did you mean 'trial'?" in unknown.stderr
    assert "no version '999'" in command("serve", "runs/tiny@999", "--port", "0").stderr
    mixed = command("serve", "runs/tiny@trial", "--newest", "--port", "0")
    assert "cannot be used with --fleet, --newest or --releases" in mixed.stderr
    signed = command("serve", "runs/tiny@2", "--public-key", "ab" * 32, "--port", "0")
    assert signed.returncode == Exit.BAD_INPUT, signed.stderr
    assert "--public-key cannot be used with a step (@2)" in signed.stderr
    models = (f"last=runs/tiny@{last.step}", "runs/tiny@trial")
    server = command.start("serve", *models, "--port", "0", "--key", "k3y")
    try:
        line = server.stdout.readline()
        assert "serving last, tiny@trial at http" in line, line + server.stderr.read()
        lines = [server.stdout.readline().strip() for _ in models]
        assert lines == [f"last: {last}", f"tiny@trial: the branch trial, now {first}"]
        with openai.OpenAI(base_url=line.split(" at ")[1].split()[0], api_key="k3y", max_retries=0) as client:
            assert [m.id for m in client.models.list().data] == ["last", "tiny@trial"]
            for name in ("last", "tiny@trial"):
                answer = client.completions.create(model=name, prompt="def f", max_tokens=4, seed=7)
                assert (answer.model, answer.usage.completion_tokens > 0) == (name, True)
                assert answer.system_fingerprint == str(last if name == "last" else first)
        prices, out = circle.parent.parent / "prices.toml", circle.parent.parent / "by-url"
        prices.write_text("machine_second = 1e-5\n[models.last]\ninput = 2.0\noutput = 2.0\ncached_input = 1.0\n")
        at = ("--url", line.split(" at ")[1].split()[0], "--model", "last", "--key-variable", "SERVED_KEY")
        asked = ("eval", "own", *at, "--config", "tiny.toml", "--tasks", "2", "--tries", "2", "--prices", prices)
        by_url_of = replace(command, env={**command.env, "SERVED_KEY": "k3y"})
        by_url = by_url_of(*asked, "--out", out)
        assert by_url.returncode == 0, by_url.stderr
        rated = read_record(out / "own" / "last.json")
        assert (rated.result.num_tasks, dict(rated.result.invalid), rated.model) == (2, {}, "last")
        assert rated.result.dollars, "every turn was asked for at the URL, and has a price"
        wrong = by_url_of(*("lsat" if one == "last" else one for one in asked), "--out", out)
        assert wrong.returncode == Exit.FAILED, wrong.stdout
        assert "error: all 4 rollouts of lsat are invalid: 4 by provider: http://127.0.0.1:" in wrong.stderr
        assert "lsat" in wrong.stderr.partition("status 404: ")[2]
        assert not (out / "own" / "lsat.json").exists()
        server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0
    finally:
        server.kill()
        server.communicate()


RELEASE = """
shares = [50]

[[gate]]
suite = "own"
margin = 1.0

[[metrics]]
name = "kept"
"""


def test_a_release_of_the_run_passes_its_gate_is_served_by_branches_and_is_rolled_back(
    circle: Path, cli_in: Callable[[Path], Any]
) -> None:
    import openai

    cwd = circle.parent.parent
    command = cli_in(cwd)
    (cwd / "release.toml").write_text(RELEASE)
    labels = ["tiny@step-000001", "tiny@step-000002"]
    for step in ("1", "2"):
        checkpoint = f"runs/tiny/checkpoints/step-00000{step}"
        assert command("eval", "own", "--checkpoint", checkpoint, "--tasks", "2").returncode == 0
    assert command("weights", "point", "runs/tiny", "1", "--branch", "stable").returncode == 0
    begun = command("release", "begin", "runs/tiny", "2", "--settings", "release.toml")
    assert begun.returncode == 0, begun.stderr
    (cwd / "trained.toml").write_text('name = "own"\npurpose = "correctness"\nsplits = ["train"]\nnum_tasks = 2\n')
    both = ["--candidate", labels[1], "--stable", labels[0], "--run", "runs/tiny"]
    gated = command("release", "gate", *both)
    assert "release 1: gated" in gated.stdout, gated.stderr
    assert "canary at 50 %" in command("release", "advance").stdout
    server = command.start("serve", "runs/tiny", "--port", "0", "--releases", "releases.sqlite")
    try:
        url = server.stdout.readline().split(" at ")[1].split()[0]
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:

            def versions() -> set[str]:
                """The versions that answered 20 users."""
                found = set()
                for i in range(20):
                    answer = client.chat.completions.create(
                        model="tiny",
                        messages=[{"role": "user", "content": "hello"}],
                        max_tokens=4,
                        extra_headers={"x-etude-user": f"user-{i}"},
                    )
                    found.add(str(answer.system_fingerprint)[:7])
                return found

            assert versions() == {"v000001", "v000002"}
            assert command("release", "rollback", "--reason", "a test").returncode == 0
            assert any(versions() == {"v000001"} for _ in range(20))  # the share is read again after .2 s
        server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0
    finally:
        server.kill()
        server.communicate()
    server = command.start("serve", "runs/tiny", "--port", "0")
    try:
        url = server.stdout.readline().split(" at ")[1].split()[0]
        said = server.stdout.readline()
        assert said.startswith("  tiny: the stable version, v000001-")
        assert "; the newest is v000002-" in said
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            assert versions() == {"v000001"}, "a candidate serves nobody, also without --releases"
    finally:
        server.kill()
        server.communicate()
    refused = command(
        "release", "begin", "runs/tiny", "2", "--settings", "release.toml", "--set", "gate=[{suite='trained.toml'}]"
    )
    assert refused.returncode == 0, refused.stderr
    trained = command("release", "gate", *both)
    assert trained.returncode == Exit.BAD_INPUT
    assert "tasks that tiny was trained on" in trained.stderr


@pytest.fixture(scope="module")
def own(game: Any, tmp_path_factory: pytest.TempPathFactory, cli_in: Callable[[Path], Any]) -> Path:
    """A finished run from a checkpoint that half knows its tasks."""
    cwd = tmp_path_factory.mktemp("own")
    done = cli_in(cwd)("run", game.config, "--name", "own", "--set", 'fleet.engines=["reference"]')
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "runs" / "own"


def test_a_step_of_a_real_run_is_redone_to_the_bit(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert etude.main(["replay", str(own), "4", "--from", "mid", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [step["equal"] for step in told["steps"]] == [True] * 4
    assert sum(step["samples"] for step in told["steps"]) > 0
    assert told["computed_by"] == {}


def test_a_run_from_the_users_own_checkpoint_learns_on_the_users_own_tasks(own: Path) -> None:
    assert [p["phase"] for p in RunFolder.open(own).phases()] == [p for p in PHASES if p != "mid-training"]
    summary = json.loads((own / "summary.json").read_text())
    assert summary["rl"]["steps"] == 4
    assert summary["rl"]["no_signal_share"] < 1.0
    assert summary["baselines"]["oracle"] == 1.0
