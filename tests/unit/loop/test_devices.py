"""A device that a config names and that is not there is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from etude.config import build
from etude.errors import ConfigError, Exit
from etude.inference.config import EngineKind
from etude.inference.external.environment import MARK, VLLM, Mark
from etude.loop.config import RunConfig
from etude.loop.devices import check_devices, check_foreign_device, count_gpus


def of(**sections: dict[str, object]) -> RunConfig:
    return build(RunConfig, sections)


def test_the_gpus_that_torch_sees_are_counted_without_torch_here() -> None:
    assert count_gpus() == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (of(engine={"device": "cuda"}), "engine.device = 'cuda'"),
        (of(learner={"device": "cuda"}), "learner.device = 'cuda'"),
        (of(engine={"device": "cuda:7"}), "engine.device = 'cuda:7'"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_by_the_name_of_its_setting(config: RunConfig, names: str) -> None:
    with pytest.raises(ConfigError, match=r"it needs \d GPUs?, and torch sees 0 here") as refused:
        check_devices(config, count=lambda: 0)
    assert refused.value.what == f"{names} is not possible"
    assert refused.value.exit_code == Exit.BAD_INPUT
    check_devices(config, count=lambda: 8)


def test_each_rank_of_this_machine_wants_a_gpu_of_its_own() -> None:
    config = of(learner={"device": "cuda", "ranks": 4}, fleet={"ranks_away": 1, "ranks_at": "127.0.0.1"})
    check_devices(config, count=lambda: 3)
    with pytest.raises(ConfigError, match="with 3 ranks is not possible: it needs 3 GPUs, and torch sees 2 here"):
        check_devices(config, count=lambda: 2)


def test_each_rank_of_an_engine_wants_a_gpu_from_the_named_one_on() -> None:
    config = of(engine={"device": "cuda:1", "tensor_parallel": 2}, numerics={"mode": "native"})
    check_devices(config, count=lambda: 3)
    with pytest.raises(ConfigError, match="'cuda:1' with 2 ranks is not possible: it needs 3 GPUs, and"):
        check_devices(config, count=lambda: 2)


def test_without_a_gpu_setting_no_device_is_queried() -> None:
    def asked() -> int:
        raise AssertionError("asked")

    check_devices(of(engine={"device": "cpu"}), count=asked)
    check_devices(RunConfig(), count=asked)


def installed(folder: Path, device: str) -> None:
    """What an install for a device leaves of itself."""
    package = folder / f"lib/python3.11/site-packages/vllm-{VLLM.version}.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Name: vllm\nVersion: {VLLM.version}\n")
    (folder / MARK).write_bytes(msgspec.json.encode(Mark(device=device)))


def test_an_engine_of_another_make_computes_on_the_device_that_it_was_installed_for(tmp_path: Path) -> None:
    installed(tmp_path, "cuda")
    native = {"numerics": {"mode": "native"}, "vllm": {"environment": str(tmp_path)}, "fleet": {"engines": ["vllm"]}}
    for device in ("auto", "cuda", "cuda:0"):
        check_foreign_device(of(engine={"device": device}, **native), EngineKind.VLLM)
    with pytest.raises(ConfigError, match="installed for cuda"):
        check_foreign_device(of(engine={"device": "cpu"}, **native), EngineKind.VLLM)
    with pytest.raises(ConfigError, match="chooses its own GPUs"):
        check_foreign_device(of(engine={"device": "cuda:1"}, **native), EngineKind.VLLM)
