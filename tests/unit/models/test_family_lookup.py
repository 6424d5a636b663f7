"""How a family of models is found: by the name of a module of etude's, or by a class's import path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.config import build
from etude.errors import CheckpointError, ConfigError, PluginRefused
from etude.models import ModelConfig
from etude.models.config import FAMILY_NAMES, OWN_FAMILIES, family_of

OWN = """
from pathlib import Path

from etude.models.config import ModelFamily
from etude.models.families.qwen3_moe import Qwen3Moe


class Good(Qwen3Moe):
    model_type = "good_moe"
    hf_class = "GoodForCausalLM"
    renamed = {".mlp.": ".moe."}


class Other(Good):
    pass


class Claims(Qwen3Moe):
    model_type = "olmoe"


class Nameless(ModelFamily):
    pass


class Raises(Good):
    model_type = "raises"

    def __init__(self):
        raise RuntimeError("no licence")


thing = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported, with families of a user's own."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(OWN_FAMILIES, "")
    return name


def test_a_modules_name_is_its_familys_model_type() -> None:
    assert {"qwen3_moe", "qwen3", "deepseek_v3", "kimi_k2", "olmoe", "mixtral"} <= set(FAMILY_NAMES)
    assert [family_of(name).model_type for name in FAMILY_NAMES] == list(FAMILY_NAMES)
    assert [family_of(name).name for name in FAMILY_NAMES] == list(FAMILY_NAMES)


def test_an_unknown_family_of_a_config_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model\.family = 'qwen3_mo' is unknown") as raised:
        build(ModelConfig, {"family": "qwen3_mo"})
    assert "did you mean 'qwen3_moe'?" in raised.value.hint


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones() -> None:
    raw = {**ModelConfig().to_hf(), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(CheckpointError, match="LlamaForCausalLM") as raised:
        ModelConfig.from_hf(raw)
    assert all(name in raised.value.facts for name in [*FAMILY_NAMES, "OlmoeForCausalLM"])
    assert OWN_FAMILIES in raised.value.hint
    for kind in (None, ["qwen3"], 3, "../qwen3", "__init__"):
        with pytest.raises(CheckpointError, match="is not supported"):
            ModelConfig.from_hf({**raw, "model_type": kind})


def test_a_family_of_the_users_own_is_named_by_a_config_and_known_where_it_starts_processes(own: str) -> None:
    sizes = build(ModelConfig, {"family": f"{own}:Good"})
    raw = sizes.to_hf()
    assert (raw["model_type"], raw["architectures"]) == ("good_moe", ["GoodForCausalLM"])
    assert ModelConfig.from_hf(raw) == sizes
    code = "import json, sys, etude.models as m; print(m.ModelConfig.from_hf(json.load(sys.stdin)).family)"
    path = {"PYTHONPATH": str(Path(sys.modules[own].__file__ or "").parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(raw), env={**os.environ, **path}, capture_output=True, text=True,
        check=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.strip() == f"{own}:Good"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", "RuntimeError: no licence"),
        ("Gone", "has no Gone"),
        ("thing", "is not a class: it is an int"),
        ("Nameless", "is not a model family: it has no attribute model_type; it has no attribute hf_class"),
        ("Path", "is not a model family: it is a PosixPath, which is not derived from etude.models.config.ModelFamily"),
    ],
)
def test_a_class_that_is_no_good_family_is_refused_by_its_import_path(own: str, name: str, says: str) -> None:
    with pytest.raises(PluginRefused, match=f"{own}:{name}") as raised:
        family_of(f"{own}:{name}")
    assert says in str(raised.value)


def test_two_families_of_one_model_type_are_refused(own: str) -> None:
    with pytest.raises(ConfigError, match=f"{own}:Claims has model_type = 'olmoe'") as raised:
        family_of(f"{own}:Claims")
    assert raised.value.facts == "the family olmoe has the same one"
    family_of(f"{own}:Good")
    with pytest.raises(ConfigError, match=f"{own}:Other has model_type = 'good_moe'"):
        family_of(f"{own}:Other")


def test_a_module_that_does_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_FAMILIES, "")
    with pytest.raises(PluginRefused, match="no_such_module:Name cannot be imported") as raised:
        family_of("no_such_module:Name")
    assert "has no module 'no_such_module'" in raised.value.facts


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"head_dim": 4}, "num_heads · head_dim = 8, but hidden_size = 16"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts = None"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_its_key(
    family: str, change: dict[str, object], says: str
) -> None:
    raw = family_of(family).tiny().to_hf() | change
    with pytest.raises(CheckpointError, match=says):
        ModelConfig.from_hf(raw)


def test_heads_that_are_normalised_together_are_not_shared_by_tensor_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match=r"olmoe cannot run on 2 tensor-parallel ranks: .* over all heads"):
        family_of("olmoe").tiny().per_rank(2)
    assert family_of("olmoe").tiny().per_rank(1) == family_of("olmoe").tiny()
