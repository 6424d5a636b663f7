"""How a family of models is found: by the name of a module of etude's, or by a class's import path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from etude.config import build, to_plain
from etude.errors import CheckpointError, ConfigError, PluginRefused
from etude.models import ModelConfig
from etude.models.components import Yarn
from etude.models.family_lookup import FAMILY_NAMES, OWN_FAMILIES, family_of

ROTARY = {"rotary_dim": 2}
WINDOW = {"sliding_window": 4, "sliding_layers": [0]}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
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
    assert {"llama", "qwen2", "glm4_moe", "minimax_m2", "gpt_oss"} <= set(FAMILY_NAMES)
    assert [family_of(name).model_type for name in FAMILY_NAMES] == list(FAMILY_NAMES)
    assert [family_of(name).name for name in FAMILY_NAMES] == list(FAMILY_NAMES)


def test_an_unknown_family_of_a_config_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model\.family = 'qwen3_mo' is unknown") as raised:
        build(ModelConfig, {"family": "qwen3_mo"})
    assert "did you mean 'qwen3_moe'?" in raised.value.hint


def test_an_unknown_architecture_is_refused_by_name_with_the_known_ones() -> None:
    raw = {**ModelConfig().to_hf(), "model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(CheckpointError, match="Gemma3ForCausalLM") as raised:
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
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "original_max_position_embeddings = None"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "0 < low_freq_factor < high_freq_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("deepseek_v3", {"rope_scaling": LLAMA3 | {"mscale_all_dim": 1.0}}, "mscale_all_dim = 1.0 is not supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = 'full_attention' for each layer",
        ),
        ("glm4_moe", {"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ("glm4_moe", {"partial_rotary_factor": 1.5, "rope_parameters": None}, "partial_rotary_factor = 1.5"),
        ("glm4_moe", {"partial_rotary_factor": 0.7, "rope_parameters": None}, "RoPE rotates 5"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list = \[1, 0\] is not supported"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types = .*, expected 'full_att"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types = .* for each layer"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window = 0"),
        ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit = -1.0"),
        ("gpt_oss", {"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp8"}}, "quantised by 'mxfp8'"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised by 'mxfp4'"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_its_key(
    family: str, change: dict[str, object], says: str
) -> None:
    raw = family_of(family).tiny().to_hf() | ({"rope_parameters": None} if "rope_scaling" in change else {}) | change
    with pytest.raises(CheckpointError, match=says):
        ModelConfig.from_hf(raw)


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": YARN | {"factor": 4.0}}, "rope_parameters has factor = 4.0, but rope_scaling has 2.0"),
        (
            {"rope_parameters": YARN | {"rope_type": "llama3", "type": None}},
            "rope_parameters has rope_type = 'llama3', but rope_scaling has 'yarn'",
        ),
        ({"rope_parameters": YARN | {"beta_fast": 8}}, "rope_parameters has beta_fast = 8, but rope_scaling has None"),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters.full_attention is a JSON object",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type = 'default', but rope_scaling has 'yarn'"),
        ({"rope_scaling": YARN | {"rope_type": "llama3"}}, "rope_scaling has type = 'yarn', but rope_type = 'llama3'"),
        (
            {"rope_theta": 500_000.0, "rope_scaling": YARN | {"rope_theta": 10_000.0}},
            "rope_theta = 500000.0, but 10000.0 in rope_parameters or rope_scaling",
        ),
        (
            {"rope_theta": 500_000.0, "rope_parameters": YARN | {"rope_theta": 10_000.0}},
            "rope_theta = 500000.0, but 10000.0 in rope_parameters or rope_scaling",
        ),
        (
            {"original_max_position_embeddings": 16},
            "original_max_position_embeddings = 16, but 32 in rope_parameters or rope_scaling",
        ),
    ],
)
def test_settings_of_rope_that_contradict_are_refused_with_both_values(change: dict[str, object], says: str) -> None:
    for name in ("qwen3_moe", "mixtral", "glm4_moe"):
        raw = family_of(name).tiny().to_hf() | {"rope_scaling": YARN, "rope_parameters": None}
        raw.pop("rope_theta")
        assert ModelConfig.from_hf(raw).yarn == Yarn(factor=2.0, original_tokens=32)
        with pytest.raises(CheckpointError, match=says):
            ModelConfig.from_hf(raw | change)


def test_both_sections_of_rope_are_read_where_they_agree() -> None:
    new = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2, "original_max_position_embeddings": 32}
    for name in FAMILY_NAMES:
        config = replace(family_of(name).tiny(), yarn=None, llama3=None)
        assert ModelConfig.from_hf(config.extended(2.0).to_hf()) == config.extended(2.0)
        raw = config.to_hf()
        share = raw["rope_parameters"].get("partial_rotary_factor")
        raw |= {"rope_parameters": new | {"partial_rotary_factor": share}, "rope_scaling": YARN, "rope_theta": None}
        found = ModelConfig.from_hf(raw)
        assert (found.rope_theta, found.yarn) == (5e5, Yarn(factor=2.0, original_tokens=32)), name


def test_settings_that_only_some_families_have_are_refused_in_others() -> None:
    changes = (
        ("qwen3_moe", {"qk_norm": False}),
        ("llama", {"attention_bias": True}),
        ("olmoe", ROTARY),
        ("llama", WINDOW),
    )
    for family, change in changes:
        with pytest.raises(ConfigError, match=f"{next(iter(change))} = .*, but in family '{family}' it is always"):
            build(ModelConfig, to_plain(family_of(family).tiny()) | change)
    with pytest.raises(ConfigError, match=r"sliding_window = 0, sliding_layers = \[0\]: set both"):
        build(ModelConfig, to_plain(family_of("gpt_oss").tiny()) | {"sliding_window": 0})
    with pytest.raises(ConfigError, match="'gpt_oss' needs `swiglu`"):
        build(ModelConfig, {"family": "gpt_oss"})
    with pytest.raises(ConfigError, match="rotary_dim = 8: expected less than head_dim = 8"):
        build(ModelConfig, to_plain(family_of("glm4_moe").tiny()) | {"rotary_dim": 8})


def test_partial_rope_is_read_from_each_of_its_keys() -> None:
    glm, minimax = (family_of(name).tiny().to_hf() for name in ("glm4_moe", "minimax_m2"))
    for raw in (glm, minimax):
        for key in ("rope_parameters", "partial_rotary_factor", "rotary_dim"):
            raw.pop(key, None)
    assert ModelConfig.from_hf(glm).rotary_dim == 4  # half of a head where nothing is said, as in transformers
    assert ModelConfig.from_hf(glm | {"partial_rotary_factor": 0.25}).rotary_dim == 2
    assert ModelConfig.from_hf(glm | {"rope_parameters": {"partial_rotary_factor": 1.0}}).rotary_dim == 0
    assert ModelConfig.from_hf(minimax).rotary_dim == 0
    assert ModelConfig.from_hf(minimax | {"rotary_dim": 2}).rotary_dim == 2
    both = {"rotary_dim": 2, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    assert ModelConfig.from_hf(minimax | both).rotary_dim == 4


def test_heads_that_are_normalised_together_are_not_shared_by_tensor_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match=r"olmoe cannot run on 2 tensor-parallel ranks: .* over all heads"):
        family_of("olmoe").tiny().per_rank(2)
    assert family_of("olmoe").tiny().per_rank(1) == family_of("olmoe").tiny()
