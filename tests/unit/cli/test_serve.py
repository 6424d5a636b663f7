"""``etude serve``: what it refuses before an engine starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etude.cli import main
from etude.cli.commands import build_parser
from etude.config import to_toml
from etude.errors import EngineError, Exit
from etude.inference.external.environment import Environment, Mark
from etude.loop.config import RunConfig
from etude.loop.locations import weights_store
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.run import RunFolder
from etude.weights import Channel
from etude.weights.chain.branches import point
from etude.weights.chain.signing import Signer

SIGNER, OTHER = Signer(bytes(range(32))), Signer(bytes(32))
NO_ENGINE = "checkpoints/mid is not a checkpoint"  # the error of the start itself: these runs have no model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """runs/laptop, without a model, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ETUDE_API_KEY", raising=False)
    return RunFolder.create(tmp_path / "runs" / "laptop", config_toml=to_toml(RunConfig()), seed=0)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, code: int = Exit.BAD_INPUT) -> str:
    """Return what `etude serve` prints when it ends with `code`."""
    assert main(["serve", *argv, "--port", "0"]) == code
    said = capsys.readouterr()
    assert "capture:" not in said.out + said.err
    assert "  hint: " in said.err
    return said.err


@pytest.mark.parametrize(
    ("signs", "says"), [(None, "it has no signature"), (OTHER, "it is signed with another key"), (SIGNER, "")]
)
@pytest.mark.parametrize("branch", ["", "stable"])
def test_a_version_that_the_key_did_not_sign_is_refused_before_anything_starts(
    run: RunFolder, signs: Signer | None, says: str, branch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = weights_store(run)
    version = Channel(store, signer=signs).publish({}, step=0, parent=None, rollout_ids=[]).version
    if branch:
        point(store, "policy", version, branch=branch, signer=signs)
    key = ("--public-key", SIGNER.public_key.hex())
    said = refusal(capsys, "runs/laptop", *key)
    if signs is SIGNER:
        assert NO_ENGINE in said
        return
    assert said.startswith("error: no version of laptop is signed with this key: ")
    assert f"{version}: {says}\n" in said
    assert ("branches/policy/stable" in said) == bool(branch)


def test_a_branch_that_is_not_there_is_not_replaced_by_weights_that_nobody_signed(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = weights_store(run)
    version = Channel(store, signer=SIGNER).publish({}, step=0, parent=None, rollout_ids=[]).version
    point(store, "policy", version, branch="stable", signer=SIGNER)
    from etude.cli import serve

    monkeypatch.setattr(serve, "refuse_other_releases", lambda *_: None)
    Path("releases.sqlite").touch()
    said = refusal(capsys, "runs/laptop", "--public-key", SIGNER.public_key.hex(), "--releases", "releases.sqlite")
    assert "no version of laptop-canary is signed with this key: there is no branches/policy/canary\n" in said


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://example.org", "https://example.org"),
        ("https://Example.org/", "https://example.org"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_an_origin_is_what_browsers_send(text: str, origin: str) -> None:
    assert build_parser().parse_args(["serve", "--cors", text]).cors == [origin]


@pytest.mark.parametrize(
    "text", ["banana", "", "example.org", "https://", "https://example.org//", "https://a.org/b", "https://*.org", "*/"]
)
def test_what_is_no_origin_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--cors", text])
    assert ended.value.code == Exit.BAD_INPUT
    assert f"{text!r} is not an origin: write https://example.org" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_not_taken_for_none(run: RunFolder, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--key is empty" in refusal(capsys, "runs/laptop", "--key", key)
    assert NO_ENGINE in refusal(capsys, "runs/laptop")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("=runs/laptop", "it has no name"),
        ("a=", "it has no path"),
        ("runs/laptop@", "it has no version"),
        ("@3", "it has no run"),
        ("runs/laptop@-1", "branch name '-1' is not allowed"),
    ],
)
def test_a_model_without_one_of_its_parts_is_refused(
    run: RunFolder, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{text!r} is not a model: {says}\n" in refusal(capsys, text)


def test_models_with_the_same_name_are_told_which(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "other=runs/laptop", "runs/laptop", "laptop=runs")
    assert said.startswith("error: two models have the same name: laptop\n")


@pytest.mark.parametrize(("option", "name"), [("--capture", "privacy"), ("--feedback", "deep/feedback.sqlite")])
def test_a_folder_that_cannot_be_made_is_told_before_anything_starts(
    run: RunFolder, option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("afile").touch()
    said = refusal(capsys, "runs/laptop", option, f"afile/{name}")
    assert said.startswith(f"error: {option} cannot use the folder afile/")
    assert ": Not a directory\n" in said
    assert main(["serve", "runs/laptop", option, name]) == Exit.BAD_INPUT
    said = capsys.readouterr().err
    assert NO_ENGINE in said, "a folder that can be made is used"


def publish(run: RunFolder) -> None:
    Channel(weights_store(run)).publish({}, step=0, parent=None, rollout_ids=[])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM and SGLang, as far as anybody asks before they start."""
    monkeypatch.setattr(Environment, "require", lambda _: Mark(device="cpu"))


def test_an_engine_that_is_not_installed_is_told_before_anything_starts(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETUDE_VLLM", "/nowhere")
    said = refusal(capsys, "runs/laptop", "--engine", "vllm", code=EngineError.exit_code)
    assert said.startswith("error: vLLM is not installed: /nowhere does not exist\n")


@pytest.mark.usefixtures("installed")
def test_what_vllm_or_sglang_cannot_serve_is_refused_before_anything_starts(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(run)
    exact = "the run is in exact mode, and its learner refuses captured answers with other bits than its own"
    said = refusal(capsys, "runs/laptop", "--engine", "vllm", "--capture", "privacy")
    assert said.startswith(f"error: vLLM cannot serve laptop: {exact}\n")
    assert NO_ENGINE in refusal(capsys, "runs/laptop", "--engine", "vllm"), "nothing is captured"
    native = NumericsConfig(Mode.NATIVE)
    adapters = RunConfig(numerics=native, learner=replace(RunConfig().learner, lora_rank=4))
    low = RunConfig(numerics=NumericsConfig(Mode.NATIVE, Quantise.MXFP8))
    for name, config in (("adapters", adapters), ("low", low)):
        publish(RunFolder.create(tmp_path / "runs" / name, config_toml=to_toml(config), seed=0))
    says = "SGLang cannot serve adapters: the run publishes adapters (learner.lora_rank), which it cannot load\n"
    assert says in refusal(capsys, "runs/adapters", "--engine", "sglang")
    assert main(["serve", "runs/adapters", "--engine", "vllm", "--capture", "privacy"]) == Exit.BAD_INPUT
    assert NO_ENGINE in capsys.readouterr().err
    assert "vLLM cannot serve low: it does not round as numerics.quantise" in refusal(
        capsys, "runs/low", "--engine", "vllm"
    )
    said = refusal(capsys, "runs/laptop", "--engine", "vllm", "--fleet", "http://127.0.0.1:1")
    assert said.startswith("error: --engine vllm cannot be used with --fleet: ")


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_lent_is_refused_before_anything_starts(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lend.toml").write_text('registry = "http://127.0.0.1:1"\n')
    lend = ("--lend", "lend.toml")
    assert "--lend needs one run with published weights" in refusal(capsys, "runs/laptop", *lend)
    publish(run)
    assert NO_ENGINE in refusal(capsys, "runs/laptop", *lend)
    for more in (("--fleet", "http://127.0.0.1:1"), ("two=runs/laptop",)):
        assert "--lend needs one run with published weights" in refusal(capsys, "runs/laptop", *more, *lend)
    said = refusal(capsys, "runs/laptop", *lend, "--engine", "vllm")
    assert said.startswith("error: --lend cannot be used with --engine vllm: ")
    Path("lend.toml").write_text('registry = "http://127.0.0.1:1"\nengine = 3\n')
    assert "engine" in refusal(capsys, "runs/laptop", *lend)
    assert "nowhere.toml" in refusal(capsys, "runs/laptop", "--lend", "nowhere.toml")
    Path("lend.toml").write_text('registry = "nope"\n')
    assert "registry = 'nope' is not an http:// or https:// address" in refusal(capsys, "runs/laptop", *lend)
