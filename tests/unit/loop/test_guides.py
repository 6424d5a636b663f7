"""What guides tell of settings is so."""

import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from etude.config import build
from etude.loop.config import RunConfig

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
    assert build(RunConfig, node).learner.ranks == 4
    assert build(RunConfig, merged(node, cluster)).stores.weights.startswith("s3://")
    assert build(RunConfig, merged(merged(node, cluster), world)).fleet.listen
