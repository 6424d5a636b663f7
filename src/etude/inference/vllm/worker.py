"""What vLLM's workers are given: they follow a channel of weights, and tell which experts a token took.

`--worker-extension-cls etude.inference.vllm.worker.WorkerExtension`. Its methods are called by vLLM's `collective_rpc`,
over HTTP, whose arguments are texts and whose results are mappings and lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.errors import WeightsError
from etude.inference.vllm.routes import RoutesMissing, RouteTable
from etude.weights.follow import vllm_worker


class WorkerExtension(vllm_worker.WorkerExtension):
    """`etude.weights`' own, and routes."""

    def etude_keep_routes(self) -> dict[str, Any]:
        """Keep the experts of every token from now on; `missing`: why that cannot be, "" where it can. Idempotent."""
        if self.rank or hasattr(self, "etude_routes"):
            return {"missing": ""}
        try:
            self.etude_routes = RouteTable(self.model_runner)
        except (RoutesMissing, AttributeError, ImportError, TypeError) as error:
            return {"missing": f"{type(error).__name__}: {error}"}
        return {"missing": ""}

    def etude_take_routes(self, names: Sequence[str]) -> dict[str, str]:
        """See `RouteTable.take`."""
        return {} if self.rank else self.etude_routes.take(names)

    def etude_state(self) -> dict[str, Any]:
        """The version that waits to be adopted; whether one is on its way; or `trouble`: what preparing it failed
        with, in its three parts."""
        try:
            return {"prepared": self.etude_prepared(), "preparing": self.etude_preparing(), "trouble": ""}
        except WeightsError as error:
            return {"prepared": None, "preparing": False, "trouble": str(error)}

    def etude_swap(self) -> dict[str, Any]:
        """`etude_adopt`, and `trouble` where it failed."""
        try:
            return {**self.etude_adopt(), "trouble": ""}
        except WeightsError as error:
            return {"trouble": str(error)}
