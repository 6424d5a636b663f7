"""Which of the sampler's routes a forward replays: those that are not too stale, each of them checked.

Replay takes routing out of the ratio. On the sampler's own weights that is what is wanted: other experts there are
rounding's doing. On later weights the router itself has moved, replay hides that from the ratio and pulls the policy to
routes of the past; so what more than a few versions computed is routed anew, token by token.

Pure, without a model. Shapes: T tokens of a path, N tokens forwarded, L layers that have a router, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from etude.errors import ParityError
from etude.models.config import ModelConfig
from etude.records import Sample
from etude.records.completion import missing_route, route_dtype
from etude.records.wire import Bools, Routes

HINT_OFF = "let engines of this model return routes, or set learner.replay_routes = false"


def replayable(samples: Sequence[Sample], ends: Sequence[int], *, of: ModelConfig, step: int, max_lag: int) -> Routes:
    """Routes [N, L, K] of the first `ends` positions of each path: the sampler's where its version is at most
    `max_lag` before `step`, else `missing_route`. Raises `ParityError` that names rollout and position when one of
    them cannot be one of this model's."""
    parts = []
    for sample, end in zip(samples, ends, strict=True):
        stale = is_stale(sample, end, step=step, max_lag=max_lag)
        if stale.all():
            shape = (end, of.num_moe_layers, of.top_k)
            parts.append(np.full(shape, missing_route(of.route_dtype), of.route_dtype))
            continue
        _check_kind(sample, of)
        routes = sample.path.routes[:end]
        _check(sample, routes, ~stale, of.num_experts)
        if stale.any():
            routes = routes.copy()
            routes[stale] = missing_route(routes.dtype)
        parts.append(routes)
    return np.concatenate(parts)


def is_stale(sample: Sample, end: int, *, step: int, max_lag: int) -> Bools:
    """[end] whether a version of more than `max_lag` steps before `step` computed the position. What computed a
    position is what sampled or read the token after it; where that is unknown (-1) it counts as new."""
    computed_by = sample.path.steps[1 : end + 1]
    return (computed_by >= 0) & (step - computed_by > max_lag)


def as_tensor(routes: Routes) -> torch.Tensor:
    """Shares memory where the array may be written to."""
    return torch.from_numpy(routes if routes.flags.writeable else routes.copy())


def _check_kind(sample: Sample, of: ModelConfig) -> None:
    routes, num_tokens = sample.path.routes, len(sample.path.token_ids)
    if routes.shape[1:] != (of.num_moe_layers, of.top_k) or routes.dtype != route_dtype(of.num_experts):
        raise ParityError(
            f"rollout {sample.rollout_id} has routes of another model",
            f"{routes.dtype} of shape {routes.shape[1:]} at position 0; this one's {of.num_moe_layers} routers have "
            f"{of.num_experts} experts and choose {of.top_k}",
            hint=HINT_OFF,
        )
    if len(routes) != num_tokens:
        at = min(len(routes), num_tokens)
        raise ParityError(
            f"rollout {sample.rollout_id} lacks a route at position {at}",
            f"it has {len(routes)} for {num_tokens} tokens",
            hint=HINT_OFF,
        )


def _check(sample: Sample, routes: Routes, wanted: Bools, num_experts: int) -> None:
    """Raises unless every wanted position has existing, distinct experts in each layer."""
    beyond = (routes >= num_experts).any((1, 2)) & wanted
    ordered = np.sort(routes, -1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any((1, 2)) & wanted
    wrong = beyond | twice
    if not wrong.any():
        return
    at = int(wrong.argmax())
    if not beyond[at]:
        what = "names an expert twice"
    elif (routes[at] == missing_route(routes.dtype)).any():
        what = "lacks a route"
    else:
        what = "has a route to no expert"
    raise ParityError(
        f"rollout {sample.rollout_id} {what} at position {at}",
        f"{int(wrong.sum())} of {int(wanted.sum())} positions; there it has {routes[at].tolist()}",
        hint="every engine must return the routes of every position it computed",
    )
