"""A vLLM worker extension with which a running vLLM follows a channel: `--worker-extension-cls
etude.weights.follow.vllm_worker.WorkerExtension`.

vLLM calls its methods by `collective_rpc`, which runs between two steps of the engine. This is the pause; requests in
flight keep their KV cache. `etude_prepare` fetches, decodes and verifies in a thread while requests run; `etude_adopt`
only writes.

On a GPU it writes into vLLM's own parameters. The CPU build packs linear layers and experts for its kernels, in an
undocumented order. There, an unpacked copy is written and vLLM's own functions pack the changed tensors again. (vLLM's
own reload does not repack experts and reports no error: measured with 0.32, the mean |change of a logprob| of 0.0057
became 0.305.)

The names of a Hugging Face checkpoint are mapped to vLLM's for decoders with q/k/v or latent attention, gate/up and
experts. Weights that cannot be mapped bit for bit are refused: quantised weights, experts that GPU kernels rearranged,
and expert parallelism. For latent attention vLLM makes matrices for decoding from `kv_b_proj`: views of it, or copies.
After `kv_b_proj` was written, vLLM's own function makes them again. Tested with vLLM 0.32 on CPU, not yet on a GPU.
docs/guides/weights-alone.md lists what must be installed beside vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from etude.errors import WeightsError
from etude.records.adapter import adapted_modules
from etude.records.completion import Version
from etude.stores import open_store
from etude.weights.files.checkpoint import read_checkpoint
from etude.weights.follow.adapter_map import adapter_map
from etude.weights.follow.engine_maps import fused_pieces, sharded
from etude.weights.follow.follower import Follower
from etude.weights.follow.live import Call
from etude.weights.follow.runtime_map import Derived, Map, merge_pieces
from etude.weights.follow.targets import Swap, Target

_AS_LOADED = ("TRITON", "BATCHED_TRITON")
"""vLLM's backends that keep experts in the order of the checkpoint."""


class WorkerExtension:
    """The class that vLLM mixes into its worker class: methods with which the worker follows a channel of weights.

    Not thread-safe: vLLM makes one call at a time. A version is passed as a dict of `step`, `incarnation` and `digest`.
    Before `etude_follow`, every other method raises `WeightsError`.
    """

    model_runner: Any  # vLLM's
    vllm_config: Any
    rank: int

    def etude_follow(
        self, store: str, name: str = "policy", branch: str = "", public_key: str = "", cache: str = ""
    ) -> None:
        """Start to follow channel `name` of a store, or a branch of it. Fetches nothing yet.

        `store`: its location, as for `open_store`. `cache`: a local directory for fetched objects; empty: none.
        `public_key`: 64 hex digits; accept only versions signed by this key; empty: accept all. Raises `WeightsError`
        for an invalid key, and if vLLM stores experts in a way that cannot be mapped. Raises `StoreError` if the store
        cannot be opened.
        """
        try:
            key = bytes.fromhex(public_key) or None
        except ValueError as error:
            hint = "give the public key's 64 hexadecimal digits"
            raise WeightsError(f"{public_key!r} is not a public key", str(error), hint=hint) from None
        follower = partial(
            Follower, open_store(store, cache=cache or None), name, branch=branch, public_key=key, can_undo=False
        )
        rows, base = _rows(self.vllm_config), Path(self.vllm_config.model_config.model)
        memory = _memory(self.model_runner.model, self.vllm_config.model_config.dtype)
        self.etude_weight_sync = _WeightSync(follower, memory, rows, self.rank % rows.size, base=base)

    def etude_prepare(self, version: Mapping[str, Any] | None = None) -> None:
        """Start to fetch and verify the newest version, or `version`, while requests run. Returns at once.

        Does nothing if a version is being prepared or waits to be adopted; a waiting version is replaced if another one
        is named.
        """
        _sync_of(self).prepare(None if version is None else Version(**version))

    def etude_prepared(self) -> dict[str, Any] | None:
        """Return the version that waits to be adopted (a dict), or None. Raises the error if preparing failed."""
        swap = _sync_of(self).prepared()
        return None if swap is None else _version_fields(swap.version)

    def etude_preparing(self) -> bool:
        """Return whether a version is being prepared or waits to be adopted."""
        return _sync_of(self).preparing

    def etude_adopt(self) -> dict[str, Any]:
        """Write the prepared version into the worker's weights.

        Return a dict of its `version`, `pause_s` (seconds in which nothing else ran) and `list_bytes` (memory of the
        lists of changes). Raises `WeightsError` if nothing is prepared, or if writing failed: its hint says whether the
        old weights were restored. The first version, and the first after an undo or a failure, cannot be undone.
        """
        return _sync_of(self).adopt()

    def etude_undo(self) -> None:
        """Write back the weights before the last adoption, and drop the prepared version.

        The next version is fetched from a full snapshot. Raises `WeightsError` if there is nothing to undo.
        """
        _sync_of(self).undo()

    def etude_check(self) -> list[str]:
        """Compare memory with the adopted version, bit for bit. Return the checkpoint names of tensors that differ.

        Raises `WeightsError` if nothing is adopted or the next version is being prepared.
        """
        return _sync_of(self).check()


@dataclass(frozen=True)
class _Rows:
    """The number of rows of q, of k and v each, on this rank, and of q_a; the number of ranks that share a tensor."""

    query: int
    key: int
    size: int
    latent: int = 0


@dataclass
class _Memory:
    """Live memory by the checkpoint's module names, and the functions to call after some of it was written."""

    parameters: dict[str, Any] = field(default_factory=dict)
    packing: dict[tuple[str, ...], Call] = field(default_factory=dict)


class _WeightSync:
    """The state of a worker that follows a channel: its follower, the version being prepared, the adopted one."""

    def __init__(
        self, make: Callable[..., Follower], memory: _Memory, rows: _Rows, rank: int, *, base: Path | None = None
    ) -> None:
        self._make, self._memory, self._rows, self._rank, self._base = make, memory, rows, rank, base
        self._follower = make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etude-follow")
        self._preparing: Future[Swap | None] | None = None
        self._target: Target | None = None
        self._adopted: Swap | None = None

    def prepare(self, version: Version | None) -> None:
        if self._preparing is not None and not self._preparing.done():
            return
        waiting = self.prepared()
        if waiting is not None:
            if version is None or version == waiting.version:
                return
            self._forget()
        self._preparing = self._thread.submit(self._prepare, version)

    @property
    def preparing(self) -> bool:
        return self._preparing is not None

    def prepared(self) -> Swap | None:
        preparing = self._preparing
        if preparing is None or not preparing.done():
            return None
        if preparing.exception() is not None or preparing.result() is None:
            self._preparing = None  # so that it can be prepared again
        return preparing.result()

    def adopt(self) -> dict[str, Any]:
        swap = self.prepared()
        if swap is None:
            raise WeightsError("no version is prepared", hint="call etude_prepare, then wait for etude_prepared")
        started = time.perf_counter()
        try:
            swap.apply(_wait_for_gpu)
        except BaseException:
            self._forget()
            raise
        pause_s = time.perf_counter() - started
        if self._adopted is not None:
            self._adopted.commit()
        self._adopted, self._preparing = swap, None
        return {"version": _version_fields(swap.version), "pause_s": pause_s, "list_bytes": swap.list_bytes}

    def undo(self) -> None:
        if self._adopted is None:
            raise WeightsError(
                "there is nothing to undo",
                "no version was adopted, or it was undone already",
                hint="only the last adoption can be undone; etude_prepare fetches another version",
            )
        if self._preparing is not None and not self._preparing.done():
            hint = "wait until etude_prepared reports it"
            raise WeightsError("the adoption cannot be undone now", "the next version is being prepared", hint=hint)
        self._adopted.undo()
        self._forget()

    def check(self) -> list[str]:
        if self._target is None or self._adopted is None or self._preparing is not None:
            why = "no version is adopted" if self._adopted is None else "the next version is being prepared"
            hint = "check after an adoption, before the next etude_prepare"
            raise WeightsError("the weights cannot be checked", why, hint=hint)
        return self._target.differing(self._follower.tensors)

    def _forget(self) -> None:
        """Forget the held version: the next one is fetched from an anchor and written in full."""
        self._follower, self._preparing, self._adopted = self._new_follower(), None, None

    def _new_follower(self) -> Follower:
        return self._make(followed=self._follower.followed)

    def _prepare(self, version: Version | None) -> Swap | None:
        first = self._follower.version is None
        try:
            update = self._follower.advance(exactly=version)
            if update is None:
                return None
            if self._target is None:
                self._target = self._make_target()
            return self._target.prepare(update, self._follower.tensors, undoable=not first)
        except BaseException:
            self._follower = self._new_follower()  # it may be ahead of the memory: write the next version in full
            raise

    def _make_target(self) -> Target:
        published = self._follower.tensors
        rows = {"query_rows": self._rows.query, "key_rows": self._rows.key, "latent_rows": self._rows.latent}
        parts = {name: fused_pieces({name: value}, **rows) for name, value in self._memory.parameters.items()}
        derived = [
            Derived(frozenset(source for name in names for source in parts[name]), pack)
            for names, pack in self._memory.packing.items()
        ]
        whole = merge_pieces(*parts.values())
        of = partial(sharded, whole, rank=self._rank, size=self._rows.size)
        if not adapted_modules(published):
            return Target(Map(of({name: tensor.spec for name, tensor in published.items()}), derived=derived))
        if self._base is None:
            raise WeightsError(
                "this worker cannot load the published adapter",
                "the path of its base is not known",
                hint="pass the path of the model to vLLM",
            )
        packing = {source: one.compute for one in derived for source in one.sources}
        return Target(adapter_map(of, read_checkpoint(self._base).tensors, published, packing))


def _sync_of(worker: Any) -> _WeightSync:
    following = getattr(worker, "etude_weight_sync", None)
    if following is None:
        raise WeightsError(
            "this worker follows no channel", hint='call collective_rpc("etude_follow", args=(store,)) first'
        )
    return cast(_WeightSync, following)


def _version_fields(version: Version) -> dict[str, Any]:
    return {"step": version.step, "incarnation": version.incarnation, "digest": version.digest}


def _wait_for_gpu() -> bool:
    """Wait for the work queued on the GPU, as the probe of a swap."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return True


def _rows(config: Any) -> _Rows:
    model, parallel = config.model_config, config.parallel_config
    if config.quant_config is not None:
        raise WeightsError(
            "this vLLM computes with quantised weights",
            f"its quantisation is {type(config.quant_config).__name__}",
            hint="publish the quantised tensors, and map them with `etude.weights.follow.runtime_map`",
        )
    head = model.get_head_size()
    return _Rows(
        model.get_num_attention_heads(parallel) * head,
        model.get_num_kv_heads(parallel) * head,
        parallel.tensor_parallel_size,
        getattr(model.hf_text_config, "q_lora_rank", None) or 0,
    )


def _memory(model: Any, dtype: Any) -> _Memory:
    """Return vLLM's parameters; on the CPU build, unpacked copies of those that it packed. `dtype`: the model's."""
    from vllm.model_executor.layers.attention import MLAAttention  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]  # in vLLM's environment alone

    found, on_cpu, stems = _Memory(), current_platform.is_cpu(), dict[Any, str]()
    for module_name, module in model.named_modules():
        _refuse_rearranged(module_name, module, on_cpu=on_cpu)
        stem = stems[module] = module_name.replace(".routed_experts", "")
        if isinstance(module, MLAAttention):
            names = (f"{stems[module.kv_b_proj]}.weight",)
            pack, absorb = found.packing.get(names), partial(module.process_weights_after_loading, dtype)
            found.packing[names] = absorb if pack is None else partial(_in_turn, pack, absorb)
            continue  # its parameters are made from kv_b_proj
        plain = {name: value.data for name, value in module.named_parameters(recurse=False)}
        unpacked, pack = _unpacked(module, plain) if on_cpu else ({}, None)
        for name, value in {**plain, **unpacked}.items():
            found.parameters[f"{stem}.{name}"] = value
        if pack is not None:
            found.packing[tuple(f"{stem}.{name}" for name in unpacked)] = pack
    return found


def _refuse_rearranged(name: str, module: Any, *, on_cpu: bool) -> None:
    """Raise `WeightsError` for memory in another order than the checkpoint's, or with copies that are not updated."""
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    hint = f"use one of {', '.join(_AS_LOADED)} for experts, or map it with `etude.weights.follow.runtime_map`"
    if getattr(module, "expert_map", None) is not None:
        facts = "each rank has only some of its experts"
        hint = "leave out --enable-expert-parallel: tensor-parallel ranks divide each expert"
    elif not on_cpu and hasattr(module, "w13_weight") and getattr(backend, "name", "") not in _AS_LOADED:
        facts = f"its experts are laid out for {getattr(backend, 'name', type(module).__name__)}"
    else:
        return
    raise WeightsError(f"{name or 'the model'} has weights that cannot be mapped", facts, hint=hint)


def _unpacked(module: Any, plain: Mapping[str, Any]) -> tuple[dict[str, Any], Call | None]:
    """Return memory in the order of the checkpoint for a module that the CPU build packs, and the packing function."""
    import torch
    from vllm.model_executor.layers.linear import LinearBase  # type: ignore[import-not-found]

    if isinstance(module, LinearBase) and hasattr(module, "cpu_linear"):
        rows = getattr(module, "output_size_per_partition", module.output_size)
        columns = getattr(module, "input_size_per_partition", module.input_size)
        weight = torch.empty(rows, columns, dtype=module.params_dtype)
        return {"weight": weight}, partial(_pack_linear, module, weight)
    if hasattr(module, "cpu_linear"):  # it keeps its weight beside the packed copy
        return {"weight": plain["weight"]}, partial(module.quant_method.process_weights_after_loading, module)
    if "w13_weight" in plain:
        sizes, packed = module.moe_config, plain["w13_weight"]
        experts, inner, hidden = packed.shape[0], sizes.intermediate_size_per_partition, sizes.hidden_dim
        both = torch.empty(experts, 2 * inner, hidden, dtype=packed.dtype)
        down = torch.empty(experts, hidden, inner, dtype=packed.dtype)
        return {"w13_weight": both, "w2_weight": down}, partial(_pack_experts, module, both, down)
    return {}, None


def _in_turn(*calls: Call) -> None:
    for call in calls:
        call()


def _pack_linear(module: Any, weight: Any) -> None:
    import torch

    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


def _pack_experts(module: Any, both: Any, down: Any) -> None:
    import torch

    module.w13_weight = torch.nn.Parameter(both, requires_grad=False)
    module.w2_weight = torch.nn.Parameter(down, requires_grad=False)
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
