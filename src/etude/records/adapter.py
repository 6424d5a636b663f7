"""What an adapter (LoRA, arXiv 2106.09685) is beside its numbers: rank, scale, modules, and the base it belongs to.

In a directory these are PEFT's `adapter_config.json`, which peft and vLLM read; in a channel of weights the same facts
are a tensor of bytes beside the others, so that one digest proves them together. A base is named by a digest of all its
weights as they are computed with: an adapter of another one is refused, whatever its shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUBLISHED = "adapter_config"
"""The tensor of bytes beside a published adapter's A and B (`AdapterConfig.to_bytes`)."""
BASE_CHANNEL = "base"
"""The channel beside a policy's in which its base lies, for engines that have no checkpoint."""
PREFIX = "base_model.model."
"""What PEFT puts before a base's names."""
A, B = ".lora_A.weight", ".lora_B.weight"
_PLAIN = {"bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None}
_VARIED = ("rank_pattern", "alpha_pattern", "target_parameters", "layers_to_transform")  # by which modules differ


@dataclass(frozen=True)
class AdapterConfig:
    """Of one adapter.

    >>> config = AdapterConfig(rank=8, alpha=32.0, modules=("down_proj", "up_proj"), base="ab" * 32)
    >>> config.scale, AdapterConfig.from_bytes(config.to_bytes()) == config
    (4.0, True)
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]  # the last parts of the names of what is adapted, sorted
    base: str  # of the weights it belongs to, 64 hex characters (`lora.base_digest`); empty: not known

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def to_bytes(self) -> bytes:
        """As a channel ships it: the same bytes for the same adapter, wherever its files lie."""
        return json.dumps({**self._facts(), "base": self.base}, sort_keys=True).encode()

    def to_peft(self, base: Path) -> dict[str, Any]:
        """The content of PEFT's adapter_config.json. `base`: where the base lies."""
        named = {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "inference_mode": True}
        return {**self._facts(), **named, **_PLAIN, "lora_dropout": 0.0, "init_lora_weights": True}

    def _facts(self) -> dict[str, Any]:
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": alpha, "target_modules": list(self.modules)}

    @classmethod
    def from_bytes(cls, data: bytes) -> AdapterConfig:
        """Raises `ValueError`."""
        raw = json.loads(data)
        return cls.from_peft(raw, raw.get("base", "") if isinstance(raw, dict) else "")

    @classmethod
    def from_peft(cls, raw: Any, base: str) -> AdapterConfig:
        """The content of an adapter_config.json. Raises `ValueError` for one that is damaged, or of a kind that nothing
        here computes."""
        if not isinstance(raw, Mapping):
            raise ValueError("it is no object")
        other = {key: raw[key] for key, plain in _PLAIN.items() if raw.get(key, plain) != plain}
        other |= {key: raw[key] for key in _VARIED if raw.get(key)}
        if raw.get("peft_type") != "LORA" or other:
            facts = "".join(f", {k} = {v!r:.40}" for k, v in other.items())
            raise ValueError(f"peft_type = {raw.get('peft_type')!r}{facts}: only plain LORA is computed")
        rank, alpha, modules = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
        if not (
            isinstance(rank, int)
            and rank > 0
            and isinstance(alpha, int | float)
            and isinstance(modules, list)
            and all(isinstance(name, str) for name in modules)
            and re.fullmatch("([0-9a-f]{64})?", base)
        ):
            raise ValueError(f"r = {rank!r}, lora_alpha = {alpha!r}, target_modules = {modules!r:.80}")
        return cls(rank, float(alpha), tuple(sorted(modules)), base)


def lora_names(module: str) -> tuple[str, str]:
    """PEFT's names of A and B of what Hugging Face calls `module`.

    >>> lora_names("model.layers.0.mlp.up_proj.weight")[0]
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    stem = PREFIX + module.removesuffix(".weight")
    return stem + A, stem + B


def adapted_modules(published: Iterable[str]) -> list[str]:
    """Hugging Face's names of what is adapted, by published names; none where all weights are published.

    >>> adapted_modules(lora_names("model.layers.0.mlp.up_proj.weight"))
    ['model.layers.0.mlp.up_proj.weight']
    """
    return [name.removeprefix(PREFIX).removesuffix(A) + ".weight" for name in published if name.endswith(A)]
