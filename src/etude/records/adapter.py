"""The configuration of a LoRA adapter (arXiv 2106.09685): rank, scale, adapted modules, and the base model.

In a directory it is PEFT's `adapter_config.json`, which peft and vLLM read. When the learner publishes an adapter to
the engines, it is a tensor of bytes beside A and B, so that one digest covers all of them. The base model is identified
by a digest of all its weights in the dtype that is used for computing. An adapter of another base is refused, whatever
its shapes are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUBLISHED = "adapter_config"
"""Name of the tensor of bytes with the configuration of a published adapter (`AdapterConfig.to_bytes`)."""
BASE_CHANNEL = "base"
"""Name of the channel with the base model of a policy's adapters, for engines without a checkpoint."""
PREFIX = "base_model.model."
"""PEFT's prefix of the base model's tensor names."""
A, B = ".lora_A.weight", ".lora_B.weight"
_PLAIN = {"bias": "none", "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None}
_VARIED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "layers_to_transform",
)  # settings that differ between modules


@dataclass(frozen=True)
class AdapterConfig:
    """The configuration of one LoRA adapter.

    `modules`: the last parts of the names of the adapted modules, sorted. `base`: the SHA-256 digest of the base
    model's weights as 64 hex characters, or "" if it is unknown.

    >>> config = AdapterConfig(rank=8, alpha=32.0, modules=("down_proj", "up_proj"), base="ab" * 32)
    >>> config.scale, AdapterConfig.from_bytes(config.to_bytes()) == config
    (4.0, True)
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    base: str

    @property
    def scale(self) -> float:
        """The factor of B @ A in the merged weight: alpha / rank."""
        return self.alpha / self.rank

    def to_bytes(self) -> bytes:
        """Serialise the configuration as JSON for publishing. Equal configurations give equal bytes."""
        return json.dumps({**self._facts(), "base": self.base}, sort_keys=True).encode()

    def to_peft(self, base: Path) -> dict[str, Any]:
        """Return the content of PEFT's adapter_config.json, with `base` as the directory of the base model."""
        named = {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "inference_mode": True}
        return {**self._facts(), **named, **_PLAIN, "lora_dropout": 0.0, "init_lora_weights": True}

    def _facts(self) -> dict[str, Any]:
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": alpha, "target_modules": list(self.modules)}

    @classmethod
    def from_bytes(cls, data: bytes) -> AdapterConfig:
        """Parse the bytes of `to_bytes`. Raises `ValueError` when they are damaged."""
        raw = json.loads(data)
        return cls.from_peft(raw, raw.get("base", "") if isinstance(raw, dict) else "")

    @classmethod
    def from_peft(cls, raw: Any, base: str) -> AdapterConfig:
        """Parse `raw`, the decoded JSON of an adapter_config.json.

        `base`: the digest of the base weights, or "". Raises `ValueError` when the file is damaged, or when the adapter
        is not plain LoRA (DoRA, rsLoRA, ranks that differ between modules)."""
        if not isinstance(raw, Mapping):
            raise ValueError("it is not an object")
        other = {key: raw[key] for key, plain in _PLAIN.items() if raw.get(key, plain) != plain}
        other |= {key: raw[key] for key in _VARIED if raw.get(key)}
        if raw.get("peft_type") != "LORA" or other:
            facts = "".join(f", {k} = {v!r:.40}" for k, v in other.items())
            raise ValueError(f"peft_type = {raw.get('peft_type')!r}{facts}: only plain LORA is supported")
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
    """Return PEFT's tensor names of (A, B) for the weight that Hugging Face names `module`.

    >>> lora_names("model.layers.0.mlp.up_proj.weight")[0]
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    stem = PREFIX + module.removesuffix(".weight")
    return stem + A, stem + B


def adapted_modules(published: Iterable[str]) -> list[str]:
    """Return Hugging Face's names of the adapted weights, from the names of the published tensors.

    The list is empty when the published tensors are not an adapter.

    >>> adapted_modules(lora_names("model.layers.0.mlp.up_proj.weight"))
    ['model.layers.0.mlp.up_proj.weight']
    """
    return [name.removeprefix(PREFIX).removesuffix(A) + ".weight" for name in published if name.endswith(A)]
