"""The command lines of a run's engines contain every setting of the config."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from etude.config import Plugin, to_toml
from etude.inference.config import SERVERS, EngineConfig, EngineKind, ExternalEngineConfig, Speculation
from etude.inference.external.serving import make_parser
from etude.inference.serving import config_of
from etude.loop.config import FleetConfig, RunConfig
from etude.loop.run_processes import engine_argv
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.run import RunFolder

DRAFTER = Plugin("my_package.drafters:Mine", {"least": 3, "names": ["a b"]}, "0" * 64)
ENGINE = EngineConfig(
    max_sequences=24,
    context_tokens=600,
    chunk_tokens=128,
    step_tokens=256,
    max_waiting=100,
    pin_lease_s=2.5,
    stall_s=300.0,
    dtype=ComputeDtype.BFLOAT16,
    device="cuda:1",
    tensor_parallel=4,
    speculation=DRAFTER,
)


@pytest.mark.parametrize("kind", list(EngineKind))
def test_an_engine_is_started_with_every_setting_of_the_run(kind: EngineKind, tmp_path: Path) -> None:
    default = EngineConfig()
    assert all(getattr(ENGINE, f.name) != getattr(default, f.name) for f in dataclasses.fields(ENGINE))
    foreign = ExternalEngineConfig(environment=tmp_path, kv_tokens=4096, arguments=("--a=b", "--c=d"))
    sizes = ENGINE
    if kind is not EngineKind.REFERENCE:  # others refuse these
        sizes = dataclasses.replace(ENGINE, speculation=Speculation.OFF, tensor_parallel=1)
    config = RunConfig(
        engine=sizes,
        numerics=NumericsConfig(mode=Mode.NATIVE),
        fleet=FleetConfig(engines=(kind,)),
        model=dataclasses.replace(RunConfig().model, context_tokens=600),
        vllm=foreign,
        sglang=foreign,
    )
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    module, server, *words = engine_argv(run, config, "engine-0", kind)
    assert (module, server) == ("-m", SERVERS[kind])
    args, unknown = make_parser("any", "engine").parse_known_args(words)
    assert config_of(args) == sizes
    if kind is EngineKind.REFERENCE:
        given = config_of(args).speculation
        assert isinstance(given, Plugin)
        assert (given.settings, given.digest) == (DRAFTER.settings, DRAFTER.digest)
    if kind is EngineKind.REFERENCE:
        assert unknown == ["--mode", "native", "--quantise", "none", "--degree", "1"]
    else:
        assert (args.environment, args.kv_tokens, args.argument) == (tmp_path, 4096, ["--a=b", "--c=d"])
