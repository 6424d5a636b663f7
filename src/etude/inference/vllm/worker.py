"""The extension of vLLM's workers: updates their weights from a channel, and records routes.

`--worker-extension-cls etude.inference.vllm.worker.WorkerExtension`. Its methods are called by vLLM's `collective_rpc`
over HTTP; arguments are texts, results are mappings and lists.

Routes (the experts that the MoE routers chose) are recorded for vLLM builds that do not return them: the first model
runner, as on a CPU. This uses vLLM's own hooks: `set_capture_fn` of the routers gets every token's experts, and the
forward context's slot mapping gives each token's KV slot. Routes are stored by slot beside the KV cache, so that those
of a cached prefix are available too. One method is replaced, on the runner object: `_on_request_state_removed`, which
vLLM calls before the slots of a request are reused. If any of this differs from the tested version, `RoutesMissing` is
raised at the start, and the engine lacks the capability "routes"."""

from __future__ import annotations

import base64
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from etude.errors import WeightsError
from etude.weights.follow import vllm_worker

MAX_KEPT = 4096  # ended requests whose routes were not fetched yet; the oldest are dropped
_NAME = re.compile(r"(?:.*-)?(routes\.[0-9a-f]+)(?:-.*)?")


class RoutesMissing(Exception):
    """Raised when this vLLM differs from the version that this module was written for."""


class RouteTable:
    """The routes of each slot of the KV cache, recorded in a model runner of vLLM 0.32. `WorkerExtension` makes one.

    They are int16 [slots, MoE layers, top_k]; -1 means unknown. Raises `RoutesMissing` for another version of vLLM."""

    def __init__(self, runner: Any) -> None:
        import torch
        from vllm.forward_context import get_forward_context  # type: ignore[import-not-found]

        self._runner, self._context = runner, get_forward_context
        routers = _routers(runner.model)
        for name in ("requests", "kv_cache_config", "_on_request_state_removed"):
            if not hasattr(runner, name):
                raise RoutesMissing(f"{type(runner).__name__} has no {name}")
        groups = runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise RoutesMissing(f"{len(groups)} groups of KV caches, and routes are kept by the slots of one")
        self._block_size = int(groups[0].kv_cache_spec.block_size)
        slots = runner.kv_cache_config.num_blocks * self._block_size
        top_k = runner.model_config.get_num_experts_per_tok()
        self._kept = torch.full((slots, len(routers), top_k), -1, dtype=torch.int16)  # -1: unknown; 0 is an expert
        self._done: OrderedDict[str, bytes] = OrderedDict()
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))
        self._was_removed = runner._on_request_state_removed
        runner._on_request_state_removed = self._removed

    def take(self, names: Sequence[str]) -> dict[str, str]:
        """Return the routes of the ended requests `names`, and drop them.

        Each is base64 of int16 [positions, MoE layers, top_k], from position 0. Unknown names are left out."""
        living = {_name(req_id): state for req_id, state in self._runner.requests.items()}
        found = {name: self._done.pop(name, None) or self._read(living.get(name)) for name in names}
        return {name: base64.b64encode(data).decode() for name, data in found.items() if data is not None}

    def _capture(self, layer: int, topk_ids: Any) -> None:
        """Record the experts of a forward pass, [tokens, top_k]. A router calls this."""
        import torch

        mapping = self._context().slot_mapping
        if not mapping:
            return  # a warm-up pass without requests
        slots = next(iter(mapping.values()))[: len(topk_ids)]
        self._kept[slots, layer] = topk_ids[: len(slots)].to("cpu", torch.int16)

    def _removed(self, req_id: str, state: Any) -> None:
        """Save the routes of an ended request.

        The runner calls this before its next forward pass, which may reuse slots."""
        self._was_removed(req_id, state)
        name = _name(req_id)
        if name is None or state is None:
            return
        data = self._read(state)
        if data is not None:
            self._done[name] = data
            while len(self._done) > MAX_KEPT:
                self._done.popitem(last=False)

    def _read(self, state: Any) -> bytes | None:
        """Return the routes of all computed positions: all but the last sampled token."""
        import torch

        if state is None or not state.block_ids:
            return None
        size, count = self._block_size, state.num_tokens - 1
        blocks = torch.tensor(state.block_ids[0], dtype=torch.int64)
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:count]
        return bytes(self._kept[slots].numpy().tobytes())


def _routers(model: Any) -> list[Any]:
    """Return the routers of the model's MoE layers, in order. Raises `RoutesMissing`."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner  # type: ignore[import-not-found]

    found = [module for module in model.modules() if isinstance(module, MoERunner)]
    found.sort(key=lambda module: module.layer_id)
    if not found or not all(hasattr(module.router, "set_capture_fn") for module in found):
        raise RoutesMissing(f"{len(found)} MoE layers, and not all of their routers have set_capture_fn")
    return [module.router for module in found]


def _name(req_id: str) -> str | None:
    """Return the adapter's request id in vLLM's, or None for a request that wants no routes.

    >>> _name("generate-tokens-routes.0a1f-9c2b7d10"), _name("generate-tokens-0a1f-9c2b7d10")
    ('routes.0a1f', None)
    """
    found = _NAME.fullmatch(req_id)
    return found[1] if found else None


class WorkerExtension(vllm_worker.WorkerExtension):
    """The extension of vLLM's workers that `etude.weights` has for updates of the weights, with routes added."""

    def etude_keep_routes(self) -> dict[str, Any]:
        """Start to record the experts of every token. Further calls do nothing.

        Returns ``{"missing": text}``: why that is not possible, or ""."""
        if self.rank or hasattr(self, "etude_routes"):
            return {"missing": ""}
        try:
            self.etude_routes = RouteTable(self.model_runner)
        except (RoutesMissing, AttributeError, ImportError, TypeError) as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        return {"missing": ""}

    def etude_take_routes(self, names: Sequence[str]) -> dict[str, str]:
        """Return and drop the routes of ended requests, as `RouteTable.take` does.

        Only the worker of rank 0 has some."""
        return {} if self.rank else self.etude_routes.take(names)

    def etude_state(self) -> dict[str, Any]:
        """Return the state of the update of the weights, with three keys.

        `prepared` is the version that is ready to be written, or None. `preparing` says whether one is being fetched.
        `trouble` is the error of the last preparation, or ""."""
        try:
            return {"prepared": self.etude_prepared(), "preparing": self.etude_preparing(), "trouble": ""}
        except WeightsError as error:
            return {"prepared": None, "preparing": False, "trouble": str(error)}

    def etude_swap(self) -> dict[str, Any]:
        """Write the prepared version by `etude_adopt`. Returns its result, and `trouble`: the error, or ""."""
        try:
            return {**self.etude_adopt(), "trouble": ""}
        except WeightsError as error:
            return {"trouble": str(error)}
