"""Settings of engines. Imports no torch, so that processes that start engines can read it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from etude.config import ranged
from etude.numerics.config import ComputeDtype, check_device

BLOCK_TOKENS = 32  # block size of vLLM's KV cache; kernels of its CPU build need multiples of it


class EngineKind(enum.StrEnum):
    """The server software of an engine."""

    REFERENCE = "reference"  # etude's own: every mode, format and family
    VLLM = "vllm"  # vLLM in a separate environment; not exact
    SGLANG = "sglang"  # SGLang in a separate environment; not exact


SERVERS = {
    EngineKind.REFERENCE: "etude.inference.server",
    EngineKind.VLLM: "etude.inference.vllm.server",
    EngineKind.SGLANG: "etude.inference.sglang.server",
}
"""The module that an engine's process runs (`python -m`), by kind."""


@dataclass(frozen=True)
class EngineConfig:
    """The `[engine]` section: sizes and time limits of one engine.

    >>> EngineConfig(max_sequences=8).context_tokens
    1024
    """

    max_sequences: int = ranged(64, low=1, high=4096)  # decoded together; also the number of KV slots
    context_tokens: int = ranged(1024, low=2)  # longest context: prompt and completion
    chunk_tokens: int = ranged(256, low=1)  # reference engines cut prompts at multiples of this position
    step_tokens: int = ranged(512, low=1)  # most prompt tokens of a step, beside one decoded token per sequence
    max_waiting: int = ranged(1024, low=0)  # most requests waiting for a slot; one more is refused
    pin_lease_s: float = ranged(3.0, low=0.0)  # how long a pinned session keeps its version between two calls
    stall_s: float = ranged(60.0, low=0.1)  # a step that takes longer counts as a hang
    dtype: ComputeDtype = ComputeDtype.FLOAT32  # in exact mode the same as the learner's
    device: str = "auto"  # reference engines only: auto, cpu, cuda, cuda:N; in exact mode as the learner's

    def __post_init__(self) -> None:
        check_device(self.device)

    def arguments(self) -> list[str]:
        """All settings as command-line arguments of an engine's process, for `serving.config_of`.

        >>> EngineConfig(device="cpu").arguments()[-2:]
        ['--device', 'cpu']
        """
        settings = ((f"--{field.name.replace('_', '-')}", str(getattr(self, field.name))) for field in fields(self))
        return [word for setting in settings for word in setting]


_PARALLEL = (
    ("tensor-parallel-size", "tp", "tp-size"),
    ("pipeline-parallel-size", "pp", "pp-size"),
    ("data-parallel-size", "dp", "dp-size"),
    ("prefill-context-parallel-size", "pcp"),
)
"""The options of vLLM and SGLang for each parallel size. A server computes on as many devices as their product."""


def devices_of(arguments: Sequence[str]) -> int:
    """Number of devices of one server: the product of the parallel sizes in its arguments.

    With ``--enable-dp-attention`` SGLang's data-parallel ranks are among its tensor-parallel ranks and are not counted
    again. With ``--nnodes`` the devices are divided by the number of nodes.

    >>> devices_of(["--tp", "8", "--dp=4", "--enable-dp-attention"]), devices_of(["--tensor_parallel_size=4", "-pp=2"])
    (8, 8)
    >>> devices_of([])
    1
    """
    given: dict[str, str] = {}
    for at, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if word.startswith("-"):
            given[name.lstrip("-").replace("_", "-")] = value or next(iter(arguments[at + 1 : at + 2]), "")

    def size(names: Sequence[str]) -> int:
        value = next((given[name] for name in names if name in given), "1")
        return int(value) if value.isdecimal() and int(value) else 1  # the server itself refuses any other value

    tensor, pipeline, data, context = map(size, _PARALLEL)
    devices = tensor * pipeline * context * (1 if "enable-dp-attention" in given else data)
    return max(1, devices // size(("nnodes",)))


@dataclass(frozen=True)
class ExternalEngineConfig:
    """The `[vllm]` and `[sglang]` sections: settings of these engines, in addition to `[engine]`."""

    environment: Path | None = None  # None: $ETUDE_VLLM (or $ETUDE_SGLANG), or where `etude engines install` put it
    kv_tokens: int | None = ranged(None, low=BLOCK_TOKENS)  # tokens of KV cache; None: max_sequences full contexts
    arguments: tuple[str, ...] = ()  # passed to the server: ["--tensor-parallel-size=8"]

    @property
    def devices(self) -> int:
        """Number of devices of one engine, from the parallel sizes in `arguments`.

        >>> ExternalEngineConfig(arguments=("--tensor-parallel-size=8", "-dp", "2")).devices
        16
        """
        return devices_of(self.arguments)

    def kv_capacity(self, engine: EngineConfig) -> int:
        """Size of the KV cache in tokens: `kv_tokens`, or `max_sequences` full contexts.

        >>> ExternalEngineConfig().kv_capacity(EngineConfig(max_sequences=8, context_tokens=512))
        4096
        """
        return self.kv_tokens or engine.max_sequences * engine.context_tokens

    def max_contexts(self, engine: EngineConfig) -> int:
        """Number of full contexts that fit into the KV cache, at most `max_sequences`."""
        return min(engine.max_sequences, self.kv_capacity(engine) // engine.context_tokens)
