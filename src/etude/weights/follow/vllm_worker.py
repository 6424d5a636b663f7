"""vLLM's workers follow a channel: `--worker-extension-cls etude.weights.follow.vllm_worker.WorkerExtension`.

Its methods are called by vLLM's `collective_rpc`, which runs between two steps of the engine: that is the pause, and
requests in flight keep their KV. `etude_prepare` fetches, decodes and proves in a thread beside the requests;
`etude_adopt` only writes. On a GPU that writes into vLLM's own parameters. The CPU build keeps linears and experts
packed for its kernels, in memory whose order is nobody's business: there a plain copy is written, and what was touched
is packed anew by vLLM's own functions. (Its own reload does not pack experts again, and answers as if all were well:
measured with 0.32, mean |change of a logprob| .0057 became .305.) Knows what a Hugging Face checkpoint's names are in
vLLM for decoders with q/k/v, gate/up and experts; quantised weights are refused. Tried with vLLM 0.32 on CPU; on a GPU
not yet. etude itself, without torch, has to be importable in vLLM's environment (`pip install etude --no-deps
zstandard msgspec numpy`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from etude.errors import WeightsError
from etude.records.completion import Version
from etude.stores import open_store
from etude.weights.follow.engine_maps import fused_pieces, sharded
from etude.weights.follow.follower import Follower
from etude.weights.follow.runtime_map import Derived, Map, Piece
from etude.weights.follow.targets import Swap, Target


class WorkerExtension:
    """What vLLM adds to its worker class. Not safe between threads: vLLM calls one after another."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    rank: int

    def etude_follow(self, store: str, name: str = "policy", branch: str = "", public_key: str = "") -> None:
        """Follow a channel of a store (as `open_store` takes it); `public_key`: hexadecimal, to believe only what its
        owner signed. Nothing is fetched yet. Raises `WeightsError` for a model that has no map."""
        key = bytes.fromhex(public_key) or None
        follower = partial(Follower, open_store(store), name, branch=branch, public_key=key, can_undo=False)
        rows = _rows(self.vllm_config)
        self.etude_following = _Following(follower, _memory(self.model_runner.model), rows, self.rank % rows.size)

    def etude_prepare(self) -> None:
        """Begin to fetch and prove the newest version, beside the requests, unless one is under way or waits to be
        adopted."""
        self.etude_following.prepare()

    def etude_prepared(self) -> str | None:
        """The version that waits to be adopted; None while there is none. Raises what preparing failed with."""
        swap = self.etude_following.prepared()
        return str(swap.version) if swap else None

    def etude_adopt(self) -> dict[str, Any]:
        """Write what was prepared: its `version`, and `pause_s`, in which nothing else ran. Raises `WeightsError` when
        nothing waits, or when it was not adopted: then the weights are what they were."""
        return self.etude_following.adopt()

    def etude_undo(self) -> None:
        """Write back what was there before the last adoption, and forget what is held: the next version comes from an
        anchor. Raises `WeightsError` where nothing is kept."""
        self.etude_following.undo()

    def etude_check(self) -> list[str]:
        """Names of the checkpoint whose memory does not hold, bit for bit, what was adopted. Raises `WeightsError`
        while the next version is prepared."""
        return self.etude_following.check()


@dataclass(frozen=True)
class _Rows:
    """What is this rank's of q, and of k as of v; how many ranks share a tensor."""

    query: int
    key: int
    size: int


@dataclass
class _Memory:
    """Live memory under the checkpoint's modules' names, and what has to be done once some of it was written."""

    parameters: dict[str, Any] = field(default_factory=dict)
    packing: dict[str, Any] = field(default_factory=dict)  # by the parameter that it packs


class _Following:
    def __init__(self, make: Callable[[], Follower], memory: _Memory, rows: _Rows, rank: int) -> None:
        self._make, self._memory, self._rows, self._rank = make, memory, rows, rank
        self._follower = make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etude-follow")
        self._preparing: Future[Swap | None] | None = None
        self._target: Target | None = None
        self._adopted: Swap | None = None

    def prepare(self) -> None:
        if self._preparing is None or (self.prepared() is None and self._preparing.done()):
            self._preparing = self._thread.submit(self._prepare)

    def prepared(self) -> Swap | None:
        if self._preparing is None or not self._preparing.done():
            return None
        try:
            return self._preparing.result()
        except BaseException:
            self._preparing = None  # what was held is held still: it may be tried again
            raise

    def adopt(self) -> dict[str, Any]:
        swap = self.prepared()
        if swap is None:
            raise WeightsError("no version waits to be adopted", hint="etude_prepare, then ask etude_prepared")
        started = time.perf_counter()
        try:
            swap.apply()
        except BaseException:
            self._forget()
            raise
        pause_s = time.perf_counter() - started
        if self._adopted is not None:
            self._adopted.commit()
        self._adopted, self._preparing = swap, None
        return {"version": str(swap.version), "pause_s": pause_s, "list_bytes": swap.list_bytes}

    def undo(self) -> None:
        if self._adopted is None or self._preparing is not None:
            why = "nothing was adopted" if self._adopted is None else "the next version is prepared already"
            raise WeightsError("nothing is undone", why, hint="undo before the next etude_prepare")
        self._adopted.undo()
        self._forget()

    def _forget(self) -> None:
        """Hold nothing: the next version comes from an anchor and is written whole."""
        self._follower, self._preparing, self._adopted = self._make(), None, None

    def check(self) -> list[str]:
        if self._preparing is not None:
            hint = "check after an adoption, before the next etude_prepare"
            raise WeightsError("what is held cannot be checked", "the next version is prepared", hint=hint)
        return self._target.differing(self._follower.tensors) if self._target else []

    def _prepare(self) -> Swap | None:
        first = self._follower.version is None
        update = self._follower.advance()
        if update is None:
            return None
        if self._target is None:
            self._target = self._made(update.version)
        return self._target.prepare(update, self._follower.tensors, undoable=not first)

    def _made(self, version: Version) -> Target:
        specs = {name: tensor.spec for name, tensor in self._follower.tensors.items()}
        pieces: dict[str, Sequence[Piece]] = {}
        derived = []
        for name, value in self._memory.parameters.items():
            of_one = fused_pieces({name: value}, query_rows=self._rows.query, key_rows=self._rows.key)
            pieces |= of_one
            if name in self._memory.packing:
                derived.append(Derived(frozenset(of_one), self._memory.packing[name]))
        return Target(Map(sharded(pieces, specs, rank=self._rank, size=self._rows.size), derived=derived))


def _rows(config: Any) -> _Rows:
    model, parallel = config.model_config, config.parallel_config
    if config.quant_config is not None:
        raise WeightsError(
            "this vLLM computes with quantised weights",
            f"{type(config.quant_config).__name__}",
            hint="publish what it holds, and map it by `etude.weights.follow.runtime_map`",
        )
    head = model.get_head_size()
    return _Rows(
        model.get_num_attention_heads(parallel) * head,
        model.get_num_kv_heads(parallel) * head,
        parallel.tensor_parallel_size,
    )


def _memory(model: Any) -> _Memory:
    """vLLM's parameters; on the CPU build plain ones in place of those that it packed away."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]  # in vLLM's environment alone

    found, packed = _Memory(), _packed if current_platform.is_cpu() else _plain
    for module_name, module in model.named_modules():
        stem = module_name.replace(".routed_experts", "")
        parameters = dict(module.named_parameters(recurse=False))
        for name, value, pack in packed(module, parameters):
            found.parameters[f"{stem}.{name}"] = value
            if pack is not None:
                found.packing[f"{stem}.{name}"] = pack
    return found


def _plain(module: Any, parameters: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, value.data, None) for name, value in parameters.items()]


def _packed(module: Any, parameters: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """As `_plain`, for what the CPU build does in `process_weights_after_loading` of linears, heads and experts."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase  # type: ignore[import-not-found]

    left = dict(parameters)
    made: list[tuple[str, Any, Any]] = []
    if isinstance(module, LinearBase) and hasattr(module, "cpu_linear"):
        rows = getattr(module, "output_size_per_partition", module.output_size)
        columns = getattr(module, "input_size_per_partition", module.input_size)
        weight = torch.empty(rows, columns, dtype=module.params_dtype)
        left.pop("weight")
        made.append(("weight", weight, partial(_pack_linear, module, weight)))
    elif hasattr(module, "cpu_linear"):  # the head: its weight stays, beside what was packed
        pack = partial(module.quant_method.process_weights_after_loading, module)
        made.append(("weight", left.pop("weight").data, pack))
    elif "w13_weight" in left:
        sizes = module.moe_config
        experts, inner, hidden = left["w13_weight"].shape[0], sizes.intermediate_size_per_partition, sizes.hidden_dim
        kind = left.pop("w13_weight").dtype
        left.pop("w2_weight")
        both = torch.empty(experts, 2 * inner, hidden, dtype=kind)
        down = torch.empty(experts, hidden, inner, dtype=kind)
        pack = partial(_pack_experts, module, both, down)
        made += [("w13_weight", both, pack), ("w2_weight", down, pack)]
    return [*made, *_plain(module, left)]


def _pack_linear(module: Any, weight: Any) -> None:
    import torch

    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


def _pack_experts(module: Any, both: Any, down: Any) -> None:
    import torch

    module.w13_weight = torch.nn.Parameter(both, requires_grad=False)
    module.w2_weight = torch.nn.Parameter(down, requires_grad=False)
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
