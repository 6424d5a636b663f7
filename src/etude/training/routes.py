"""Router replay: which recorded routes a forward pass replays.

Replay removes routing from the importance ratio. On the sampler's own weights that is right: other experts there result
from rounding. On later weights the router itself has moved; replay would hide that from the ratio, and pull the policy
to old routes. So routes more than a few versions old are not replayed.

Shapes: T tokens of a path, N tokens forwarded, L layers with a router, K experts per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.errors import ParityError
from etude.models.config import ModelConfig
from etude.records import Sample
from etude.records.completion import missing_route
from etude.records.rollout import UNKNOWN
from etude.records.wire import Bools, Routes

HINT_OFF = "make the engines return routes, or set learner.replay_routes = false"


@dataclass(frozen=True)
class RouteReplay:
    """The rule for which recorded routes (the experts of each token) a forward pass uses again.

    It uses those that were computed by a model like `model` at most `max_lag` steps before `step`."""

    model: ModelConfig
    step: int
    max_lag: int

    def routes(self, samples: Sequence[Sample], ends: Sequence[int]) -> torch.Tensor:
        """Return the routes of the first `ends` positions of each path, [N, L, K] in the model's `route_dtype`.

        They are `missing_route` where a route is too old. Raises `ParityError`, naming rollout and position, where a
        route to replay is missing or invalid for this model."""
        starts, dtype = np.cumsum([0, *ends]), np.dtype(self.model.route_dtype)
        shape = (starts[-1], self.model.num_moe_layers, self.model.top_k)
        routes, replayed = np.full(shape, missing_route(dtype), dtype), np.zeros(starts[-1], bool)
        for sample, start, end in zip(samples, starts, ends, strict=False):
            there = slice(start, start + end)
            replayed[there] = ~self.stale(sample, end)
            if replayed[there].any():
                _check_kind(sample, self.model)
                routes[there] = sample.path.routes[:end]
        wrong = replayed & _wrong(routes, self.model.num_experts)
        if wrong.any():
            at = int(wrong.argmax())
            one = int(np.searchsorted(starts, at, side="right")) - 1
            raise _refusal(samples[one].rollout_id, at - int(starts[one]), routes[at], self.model.num_experts)
        routes[~replayed] = missing_route(dtype)
        return torch.from_numpy(routes)

    def stale(self, sample: Sample, end: int) -> Bools:
        """Return whether the route of each of the first `end` positions is too old, [end].

        The route of a position is as old as the version that sampled the next token, or, if the next token is part of
        the prompt, as the version that read it. An unknown version (`UNKNOWN`) counts as new. The step of weights that
        a restart discarded can be negative (`experience.lineage`)."""
        computed_by = sample.path.steps[1 : end + 1]
        stale: Bools = (computed_by != UNKNOWN) & (self.step - computed_by > self.max_lag)
        return stale


def _check_kind(sample: Sample, of: ModelConfig) -> None:
    routes, num_tokens = sample.path.routes, len(sample.path.token_ids)
    if len(routes) < num_tokens:
        raise ParityError(
            f"rollout {sample.rollout_id} lacks the chosen experts at position {len(routes)}",
            f"it has {len(routes)} for {num_tokens} tokens",
            hint=HINT_OFF,
        )
    if routes.shape[1:] != (of.num_moe_layers, of.top_k) or routes.dtype != of.route_dtype:
        raise ParityError(
            f"rollout {sample.rollout_id} has routes of another model",
            f"at position 0 they are {routes.dtype} of shape {routes.shape[1:]}; the learner's model has "
            f"{of.num_moe_layers} routers, each of which chooses {of.top_k} of {of.num_experts} experts",
            hint=HINT_OFF,
        )


def _wrong(routes: Routes, num_experts: int) -> Bools:
    """Return [N] whether a layer has an expert that does not exist, or the same expert twice."""
    ordered = np.sort(routes, -1)
    wrong: Bools = ((ordered[..., 1:] == ordered[..., :-1]).any(-1) | (ordered[..., -1] >= num_experts)).any(-1)
    return wrong


def _refusal(rollout_id: str, position: int, route: Routes, num_experts: int) -> ParityError:
    if (route == missing_route(route.dtype)).any():
        what = "lacks the chosen experts"
    elif (route >= num_experts).any():
        what = "names an expert that does not exist"
    else:
        what = "names an expert twice"
    return ParityError(
        f"rollout {rollout_id} {what} at position {position}",
        f"there it has {route.tolist()}, of {num_experts} experts",
        hint="every engine must return the routes of every position it computed",
    )
