"""Settings of engines. Imports no torch, so that processes that start engines can read it."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from etude.config import Plugin, ranged
from etude.errors import ConfigError
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig, Quantise, check_device

BLOCK_TOKENS = 32  # block size of vLLM's KV cache; kernels of its CPU build need multiples of it


class EngineKind(enum.StrEnum):
    """The server software of an engine."""

    REFERENCE = "reference"  # etude's own: every mode, format and family
    VLLM = "vllm"  # vLLM in a separate environment; not exact
    SGLANG = "sglang"  # SGLang in a separate environment; not exact


class Speculation(enum.StrEnum):
    """Sources of drafts for speculative decoding. Drafts change the speed of sampling, never the tokens."""

    OFF = "off"
    HEADS = "heads"  # `heads.Heads`: the model's multi-token prediction heads, on a CPU
    LOOK_UP = "look-up"  # `look_up.LookUp`: n-grams of the sequence itself and of others in the engine


SERVERS = {
    EngineKind.REFERENCE: "etude.inference.server",
    EngineKind.VLLM: "etude.inference.vllm.server",
    EngineKind.SGLANG: "etude.inference.sglang.server",
}
"""The module that an engine's process runs (`python -m`), by kind."""


@dataclass(frozen=True)
class EngineConfig:
    """The `[engine]` section: sizes and time limits of one engine.

    - `max_sequences`: the most sequences that are decoded together; also the number of KV cache slots.
    - `context_tokens`: the most tokens of prompt and completion together.
    - `chunk_tokens`: reference engines compute long prompts in chunks that end at multiples of this number.
    - `step_tokens`: the most prompt tokens of a step, beside one decoded token per sequence.
    - `max_waiting`: the most requests that wait for a slot. Further ones are refused.
    - `pin_lease_s`: how many seconds a session that pins a version keeps it between two calls.
    - `stall_s`: a step that takes longer, in seconds, counts as a hang.
    - `dtype`: the dtype of the computation. In exact mode it must be the learner's.
    - `device`: "auto", "cpu", "cuda" or "cuda:N", for reference engines only. In exact mode it must be the learner's.
    - `tensor_parallel`: how many processes (ranks) of one machine compute the model together, each a part of every
      layer; a power of two. Reference engines only.
    - `speculation`: "off", "look-up", "heads" (with a model that has MTP heads, on a CPU), or the import path of a
      drafter (a plug-in): speculative decoding, for reference engines only.

    >>> EngineConfig(max_sequences=8).context_tokens
    1024
    """

    max_sequences: int = ranged(64, low=1, high=4096)
    context_tokens: int = ranged(1024, low=2)
    chunk_tokens: int = ranged(256, low=1)
    step_tokens: int = ranged(512, low=1)
    max_waiting: int = ranged(1024, low=0)
    pin_lease_s: float = ranged(3.0, low=0.0)
    stall_s: float = ranged(60.0, low=0.1)
    dtype: ComputeDtype = ComputeDtype.FLOAT32
    device: str = "auto"
    tensor_parallel: int = ranged(1, low=1, high=64)
    speculation: Speculation | Plugin = Speculation.OFF

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.tensor_parallel & (self.tensor_parallel - 1):
            raise ValueError(f"tensor_parallel = {self.tensor_parallel} is not a power of two")

    def arguments(self) -> list[str]:
        """Return all settings as command-line arguments of an engine's process. `serving.config_of` parses them.

        >>> EngineConfig(device="cpu").arguments()[-6:-2]
        ['--device', 'cpu', '--tensor-parallel', '1']
        """
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            word = json.dumps(asdict(value), default=str) if isinstance(value, Plugin) else str(value)
            words += [f"--{field.name.replace('_', '-')}", word]
        return words


def check_ranks(engine: EngineConfig, numerics: NumericsConfig) -> None:
    """Check that a reference engine can compute with `engine.tensor_parallel` ranks. Raises `ConfigError`."""
    ranks = engine.tensor_parallel
    if ranks == 1:
        return
    facts, hint = "", ""
    if numerics.mode is Mode.EXACT and numerics.degree % ranks:
        facts = f"numerics.degree = {numerics.degree}: exact mode gives equal bits for that number of ranks, and fewer"
        hint = f"set numerics.degree = {ranks}"
    elif numerics.mode is Mode.EXACT and engine.device.startswith("cuda"):
        facts = f"engine.device = {engine.device!r}: exact sums over ranks need CPUs"
        hint = "set engine.device = 'cpu' or numerics.mode = 'native'"
    elif numerics.quantise is not Quantise.NONE:
        facts = (
            f"numerics.quantise = {str(numerics.quantise)!r}: an engine with ranks cannot load low-precision weights"
        )
        hint = "set numerics.quantise = 'none'"
    elif engine.speculation is Speculation.HEADS:
        facts = "engine.speculation = 'heads': MTP heads draft on one rank only"
        hint = "set engine.speculation = 'look-up' or 'off'"
    if facts:
        hint += ", or engine.tensor_parallel = 1"
        raise ConfigError(f"engine.tensor_parallel = {ranks} is not possible", facts, hint=hint)


_PARALLEL = (
    ("tensor-parallel-size", "tp", "tp-size"),
    ("pipeline-parallel-size", "pp", "pp-size"),
    ("data-parallel-size", "dp", "dp-size"),
    ("prefill-context-parallel-size", "pcp"),
)
"""The options of vLLM and SGLang for each parallel size. A server computes on as many devices as their product."""


def devices_of(arguments: Sequence[str]) -> int:
    """Return the number of devices of one vLLM or SGLang server, from its command-line arguments.

    The number is the product of the sizes of tensor, pipeline and data parallelism. With ``--enable-dp-attention``
    SGLang's data-parallel ranks are among its tensor-parallel ranks and are not counted again. With ``--nnodes`` the
    devices are divided by the number of nodes.

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
    """The `[vllm]` and `[sglang]` sections: settings of these engines, in addition to `[engine]`.

    - `environment`: the virtual environment of the server. None: $ETUDE_VLLM (or $ETUDE_SGLANG), or where `etude
      engines install` put it.
    - `kv_tokens`: the size of the KV cache in tokens. None: enough for `max_sequences` full contexts.
    - `arguments`: further arguments of the server, such as ``["--tensor-parallel-size=8"]``."""

    environment: Path | None = None
    kv_tokens: int | None = ranged(None, low=BLOCK_TOKENS)
    arguments: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices of one engine, from the parallel sizes in `arguments`.

        >>> ExternalEngineConfig(arguments=("--tensor-parallel-size=8", "-dp", "2")).devices
        16
        """
        return devices_of(self.arguments)

    def kv_capacity(self, engine: EngineConfig) -> int:
        """Return the size of the KV cache in tokens: `kv_tokens`, or `max_sequences` full contexts.

        >>> ExternalEngineConfig().kv_capacity(EngineConfig(max_sequences=8, context_tokens=512))
        4096
        """
        return self.kv_tokens or engine.max_sequences * engine.context_tokens

    def max_contexts(self, engine: EngineConfig) -> int:
        """Return how many full contexts fit into the KV cache, at most `max_sequences`."""
        return min(engine.max_sequences, self.kv_capacity(engine) // engine.context_tokens)
