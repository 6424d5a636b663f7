"""Signatures in a run: the learner signs versions, engines get the public key and refuse unsigned versions."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.parity import chats

from etude.cli import main
from etude.config import build, to_toml
from etude.errors import EngineError, InputError, WeightsError
from etude.gateway import GatewayConfig
from etude.inference import Fleet
from etude.inference.config import EngineConfig, EngineKind
from etude.inference.serving import apply_public_key
from etude.loop.config import RunConfig
from etude.loop.engine_registry import required_of_engines
from etude.loop.learner import LearnerProcess
from etude.loop.locations import weights_store
from etude.loop.preflight import preflight
from etude.loop.run_processes import engine_argv
from etude.loop.serving import model_of_checkpoint, parts_of
from etude.models import Transformer
from etude.models.checkpoint import save_model
from etude.models.config import ModelConfig
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.weights import Channel, Follower
from etude.weights.chain.history import head
from etude.weights.chain.signing import Signer

SIGNER = Signer(bytes(range(32)))
SIZES = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=2,
    top_k=1,
    expert_size=16,
)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "signing.key"
    path.write_text(bytes(range(32)).hex())
    return path


def run_of(folder: Path, key: Path | None) -> tuple[RunFolder, RunConfig]:
    config = build(RunConfig, {"stores": {"signing_key": str(key)} if key else {}})
    run = RunFolder.create(folder / "run", config_toml=to_toml(config), seed=0)
    save_model(Transformer(SIZES, seed=1), run / "checkpoints" / "mid", dtype="bf16")
    return run, config


def test_a_run_with_a_key_publishes_signed_versions_and_its_engines_believe_no_others(
    tmp_path: Path, key: Path
) -> None:
    run, config = run_of(tmp_path, key)
    learning = LearnerProcess(run, config, Telemetry(run / "events" / "learner.jsonl", process="learner"))
    learning.begin(str(run / "checkpoints" / "mid"))
    learning.offer(())
    published = learning.published()
    follower = Follower(weights_store(run), public_key=SIGNER.public_key)
    assert follower.advance() is not None
    assert follower.version == published.version
    for kind in EngineKind:
        if kind is EngineKind.REFERENCE:
            argv = engine_argv(run, config, "engine-0", kind)
            assert argv[argv.index("--public-key") + 1] == SIGNER.public_key.hex()
    assert required_of_engines(run, config).public_key == SIGNER.public_key.hex()


def test_a_run_without_a_key_signs_nothing_and_tells_its_engines_of_none(tmp_path: Path) -> None:
    run, config = run_of(tmp_path, None)
    learning = LearnerProcess(run, config, Telemetry(run / "events" / "learner.jsonl", process="learner"))
    learning.begin(str(run / "checkpoints" / "mid"))
    learning.offer(())
    learning.published()
    pointer = head(weights_store(run), "policy")
    assert pointer is not None
    assert not pointer.signature
    assert "--public-key" not in engine_argv(run, config, "engine-0", EngineKind.REFERENCE)
    assert required_of_engines(run, config).public_key == ""


def test_a_run_that_was_signed_goes_on_with_its_key_alone(tmp_path: Path, key: Path) -> None:
    run, config = run_of(tmp_path, None)
    Channel(weights_store(run), signer=SIGNER).publish({}, step=0, parent=None, rollout_ids=[])
    learning = LearnerProcess(run, config, Telemetry(run / "events" / "learner.jsonl", process="learner"))
    learning.begin(str(run / "checkpoints" / "mid"))
    learning.offer(())
    with pytest.raises(WeightsError, match="is signed") as refused:
        learning.published()
    assert "stores.signing_key" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "says"), [(None, "cannot be read"), ("not hex", "does not contain a key"), ("ab", "32 bytes")]
)
def test_a_key_that_is_none_is_refused_before_the_run_starts(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    config = build(RunConfig, {"stores": {"signing_key": str(path)}})
    with pytest.raises((InputError, WeightsError), match=says) as refused:
        preflight(config)
    assert refused.value.facts
    assert refused.value.hint
    assert "not hex" not in str(refused.value)


def joined(tmp_path: Path, key: Path | None, given: bytes | None) -> Any:
    run, config = run_of(tmp_path, key)
    args = argparse.Namespace(name="west", register="http://home:8790", public_key=given)
    apply_public_key(args, required_of_engines(run, config))
    return args.public_key


def test_an_engine_that_joins_believes_the_runs_key_or_the_one_that_it_was_given(tmp_path: Path, key: Path) -> None:
    assert joined(tmp_path / "a", key, None) == SIGNER.public_key
    assert joined(tmp_path / "b", key, SIGNER.public_key) == SIGNER.public_key
    assert joined(tmp_path / "c", None, None) is None
    for i, told in enumerate((key, None)):
        with pytest.raises(EngineError, match="west would refuse the weights") as refused:
            joined(tmp_path / f"d{i}", told, bytes(32))
        assert "this engine only accepts 0000" in refused.value.facts
        assert "--public-key" in refused.value.hint


def test_a_checkpoint_that_nobody_signed_is_not_served_as_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(Transformer(SIZES, seed=1), tmp_path / "checkpoint", dtype="bf16")
    assert main(["serve", str(tmp_path / "checkpoint"), "--public-key", "ab" * 32]) != 0
    said = capsys.readouterr().err
    assert "--public-key needs the weights of a run" in said
    assert "hint:" in said


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_an_engine_that_must_serve_signed_weights_never_serves_those_of_its_checkpoint(
    tmp_path: Path, key: Path, signed: bool
) -> None:
    run, config = run_of(tmp_path, key if signed else None)
    chats.make(run / "checkpoints" / "mid", "qwen")
    (run / "checkpoints" / "mid" / "SHA256SUMS").unlink()  # it does not list the tokeniser
    learning = LearnerProcess(run, config, Telemetry(run / "events" / "learner.jsonl", process="learner"))
    learning.begin(str(run / "checkpoints" / "mid"))
    learning.offer(())
    published = learning.published().version
    source = parts_of(run.path, "tiny")._replace(engine=EngineConfig(device="cpu"))

    async def serve() -> None:
        gateway = GatewayConfig(port=0)
        told = list[str]()
        serving = model_of_checkpoint(source, public_key=SIGNER.public_key, gateway=gateway, log=told.append)
        async with serving as model:
            assert f"starting the engine of {source.checkpoint}: it reads the weights; given up after" in told[0]
            assert isinstance(model.policy, Fleet)
            assert (await model.policy.engines["engine"].info()).version == published

    if signed:
        asyncio.run(serve())
    else:
        with pytest.raises(WeightsError, match="could not load a signed version") as refused:
            asyncio.run(serve())
        assert "it has no signature" in refused.value.facts
