"""The settings and configs in the guides are valid, and fit the hardware that the guides name."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from etude import cli
from etude.config import arguments, build
from etude.harness import HarnessConfig
from etude.loop.config import RunConfig
from etude.loop.limits import build_config
from etude.plugins import found
from etude.trackers import BUILT_IN

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def keys(kind: type, before: str = "") -> set[str]:
    hints, found = get_type_hints(kind), set()
    for field in fields(kind):
        inner: Any = hints[field.name]
        found |= keys(inner, f"{before}{field.name}.") if is_dataclass(inner) else {before + field.name}
    return found


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = first | second
    return both | {
        name: first[name] | second[name] for name in first.keys() & second.keys() if isinstance(first[name], dict)
    }


def test_the_settings_that_others_are_translated_to_exist():
    rows = [line for line in (GUIDES / "coming-from.md").read_text().splitlines() if line.startswith("| ")]
    ours = [name for row in rows for name in re.findall(r"`(\w+\.\w+)(?: = [^`]*)?`", row.split(" | ")[-1])]
    assert len(ours) > 20
    assert set(ours) <= keys(RunConfig)


def test_each_step_from_a_laptop_to_regions_is_a_config():
    blocks = re.findall(r"```toml\n(.*?)```", (GUIDES / "growing.md").read_text(), re.DOTALL)
    node, cluster, world = map(tomllib.loads, blocks)
    assert build(RunConfig, node).learner.ranks == 6
    assert build(RunConfig, merged(node, cluster)).stores.weights.startswith("s3://")
    assert build(RunConfig, merged(merged(node, cluster), world)).fleet.listen


QWEN = {  # Qwen3-30B-A3B's config.json, as far as it tells sizes
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
FOUR = ["learner.ranks=4", "learner.context_parallel=4", 'fleet.engines=["vllm","vllm","vllm","vllm"]']


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("as above", []),
        ("muon", [*FOUR, "learner.optimizer=muon"]),
        ("lora_rank", [*FOUR, "learner.lora_rank=16"]),
    ],
)
def test_the_config_for_eight_gpus_fits_them_by_the_plan(tmp_path, capsys, row, settings):
    guide = (GUIDES / "growing.md").read_text()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    config = tmp_path / "node.toml"
    config.write_text(re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)[0])
    words = [word for setting in [f"start={tmp_path / 'model'}", *settings] for word in ("--set", setting)]
    assert cli.main(["plan", str(config), "--hardware", "h200", "--json", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    found, layout = told["plan"], told["layout"]
    assert layout["learner_ranks"] + layout["engines"] * layout["engine_ranks"] == 8
    cells = [found["learner_memory"]["total"] / 1e9, found["engine_memory"]["total"] / 1e9]
    assert found["learner_memory"]["fits"]
    assert found["engine_memory"]["fits"]
    (line,) = [line for line in guide.splitlines() if line.startswith("| ") and row in line]
    assert line.endswith(f"| {cells[0]:.1f} GB | {cells[1]:.1f} GB | {found['step_s']:.0f} s |")


def test_each_tracker_of_the_guide_is_a_config_with_settings_that_it_has():
    blocks = re.findall(r"```toml\n(.*?)```", (GUIDES / "trackers.md").read_text(), re.DOTALL)
    named = [tracker for text in blocks for tracker in build(RunConfig, tomllib.loads(text)).trackers]
    assert {tracker.path for tracker in named} == {*BUILT_IN}
    for tracker in named:
        arguments(found(BUILT_IN[tracker.path]), tracker.settings, "trackers")


def test_the_settings_of_agents_in_the_guides_are_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    guides = [(GUIDES / f"{name}.md").read_text() for name in ("any-harness", "your-harness", "long-tasks")]
    texts = [text for guide in guides for text in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)]
    program, endings, built_in, long_tasks = map(tomllib.loads, texts)
    program["start"] = str(tmp_path)
    with_endings = {**endings["harness"]["program"], **program["harness"]["program"]}
    both = merged(program, {"harness": {"program": with_endings}})
    assert build_config(program).harness.is_command
    assert build_config(both).harness.program.settings["status"] == {"file": "last.json", "field": "info.exit_status"}
    assert build_config(built_in).harness == HarnessConfig()
    assert build_config(long_tasks).harness.summary_tokens == 20
