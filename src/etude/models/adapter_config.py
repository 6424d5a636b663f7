"""What an adapter is, beside its numbers: rank, scale, which modules, and the base that it belongs to. Torch-free.

In a directory these are PEFT's `adapter_config.json`, which peft and vLLM read; in a channel of weights the same facts
are a tensor of bytes beside the others, so that one digest proves them together. A base is named by a digest of all its
weights as they are computed with: an adapter of another one is refused, whatever its shapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PUBLISHED = "adapter_config"
"""The tensor of bytes beside a published adapter's A and B (`AdapterConfig.to_bytes`)."""
PREFIX = "base_model.model."
"""What PEFT puts before a base's names."""
A, B = ".lora_A.weight", ".lora_B.weight"
_MAX_BASES = 8
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
        """Raises `CheckpointError`."""
        try:
            raw = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _damaged("a published adapter", str(error)) from None
        return cls.from_peft(raw, "a published adapter", raw.get("base", "") if isinstance(raw, dict) else "")

    @classmethod
    def from_peft(cls, raw: Any, where: str, base: str) -> AdapterConfig:
        """The content of an adapter_config.json. Raises `CheckpointError` for what is damaged, and for kinds
        that nothing here computes."""
        if not isinstance(raw, Mapping):
            raise _damaged(where, "it is no object")
        other = {key: raw[key] for key, plain in _PLAIN.items() if raw.get(key, plain) != plain}
        other |= {key: raw[key] for key in _VARIED if raw.get(key)}
        if raw.get("peft_type") != "LORA" or other:
            kind = f"peft_type = {raw.get('peft_type')!r}" + "".join(f", {k} = {v!r:.40}" for k, v in other.items())
            hint = "merge it into its base with the tool that trained it, and start from what comes out"
            raise CheckpointError(f"{where} is an adapter of another kind", kind, hint=hint)
        rank, alpha, modules = raw.get("r"), raw.get("lora_alpha"), raw.get("target_modules")
        if not (
            isinstance(rank, int)
            and rank > 0
            and isinstance(alpha, int | float)
            and isinstance(modules, list)
            and all(isinstance(name, str) for name in modules)
            and re.fullmatch("([0-9a-f]{64})?", base)
        ):
            raise _damaged(where, f"r = {rank!r}, lora_alpha = {alpha!r}, target_modules = {modules!r:.80}")
        return cls(rank, float(alpha), tuple(sorted(modules)), base)


def base_of(folder: Path) -> Path:
    """The directory whose weights an adapter's directory belongs to; of any other directory itself. It is looked for
    where adapter_config.json says, then beside the adapter, as `mid`: there a run keeps it, wherever the run is moved.
    Raises `CheckpointError`."""
    for _ in range(_MAX_BASES):
        if not (folder / ADAPTER_CONFIG).is_file():
            return folder
        folder = next_base(folder)
    raise CheckpointError(f"{folder} is an adapter of an adapter", f"{_MAX_BASES} deep", hint="export it merged")


def next_base(folder: Path) -> Path:
    """The base of an adapter's directory, which may be an adapter's itself. Raises `CheckpointError`."""
    named = read_peft(folder).get("base_model_name_or_path")
    places = [Path(str(named)), folder.parent / "mid"]
    for place in places:
        if (place / "config.json").is_file() and place.resolve() != folder.resolve():
            return place
    raise CheckpointError(
        f"the base of the adapter {folder} is gone",
        f"it is no checkpoint at {named!r}",
        hint=f"copy it back, or write where it lies as base_model_name_or_path into {folder / ADAPTER_CONFIG}",
    )


def read_peft(folder: Path) -> dict[str, Any]:
    """The content of a directory's adapter_config.json. Raises `CheckpointError`."""
    path = folder / ADAPTER_CONFIG
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(str(path), str(error)) from None
    if not isinstance(raw, dict):
        raise _damaged(str(path), "it is no object")
    return raw


def _damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} is damaged", why, hint="export the adapter again, or copy it again")
