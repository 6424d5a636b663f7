"""The extension of vLLM's workers: updates their weights from a channel, and records routes.

`--worker-extension-cls etude.inference.vllm.worker.WorkerExtension`. Its methods are called by vLLM's `collective_rpc`
over HTTP; arguments are texts, results are mappings and lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.errors import WeightsError
from etude.inference.vllm.routes import RoutesMissing, RouteTable
from etude.weights.follow import vllm_worker


class WorkerExtension(vllm_worker.WorkerExtension):
    """The weight-sync extension of `etude.weights`, with routes."""

    def etude_keep_routes(self) -> dict[str, Any]:
        """Start to record the experts of every token. Returns `missing`: why that is not possible, or "".
        Idempotent."""
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
        """State of the weight sync: the prepared version, whether one is being prepared, and `trouble`: the error of
        the last preparation, or ""."""
        try:
            return {"prepared": self.etude_prepared(), "preparing": self.etude_preparing(), "trouble": ""}
        except WeightsError as error:
            return {"prepared": None, "preparing": False, "trouble": str(error)}

    def etude_swap(self) -> dict[str, Any]:
        """Call `etude_adopt`. Returns its result and `trouble`: the error, or ""."""
        try:
            return {**self.etude_adopt(), "trouble": ""}
        except WeightsError as error:
            return {"trouble": str(error)}
