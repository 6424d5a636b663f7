"""Finds wrong operators of an engine: computes each operator alone on the inputs that it had in the engine.

The learner's model runs on the same tokens, while every result is replaced by the engine's result. So each operator
gets the engine's inputs, and the two results differ only by the error of that operator; errors of earlier operators do
not accumulate. In exact mode an operator is wrong if any bit differs.

In native mode the error is compared with rounding. The same computation runs in float64 with the same replacements. The
engine's error relative to float64 is compared with the error of the learner's operator in the same dtype on the same
inputs. Two numbers are used for each token: the relative error, and the *excess*, which remains after each element may
be rounded to the dtype, once in a product and twice elsewhere (a norm before and after its weight). A wrong constant of
1e-5 is far below the rounding of bf16 and cannot be seen there, only in float32.

The error of an operator that the engine does not report (in a fused kernel) is attributed to the next one that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etude.errors import EngineError
from etude.inference.operator_trace import Results
from etude.models import ModelConfig, Packed, Transformer, hf_views
from etude.numerics import Native
from etude.records.completion import missing_route

MAX_RATIO, MAX_RATIO_ALL = 6.0, 2.5
"""How many times larger than the learner's error an engine's error may be, in its worst row and over all rows: kernels
round intermediate results in another order. Correct models of both families in three dtypes reach 1.2
(tests/unit/evals/test_doctor.py)."""

_EPSILON = float(torch.finfo(torch.float32).eps)

PRODUCTS = ("qkv", "inward", ".q", "expanded", ".out", "scores", "gate_up", "down", "logits")
"""Ends of the names of results that are rounded once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A wrong operator of an engine: its result does not follow from its inputs.

    `name` is its name, such as "layers.3.attention.qkv". `error` is the relative error of the worst token, at
    `position`, and `allowed` the largest error that rounding explains (0 in exact mode). `num_rows` counts the tokens
    with a larger error. `unseen` names the operators directly before it whose results the engine does not report: the
    error may be in one of them."""

    name: str
    error: float
    allowed: float
    position: int
    num_rows: int
    unseen: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        """The number of its layer; None if it is outside of the layers."""
        head, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if head == "layers" else None


def findings(model: Transformer, token_ids: Sequence[int], engine_results: Results, *, exact: bool) -> list[Finding]:
    """Find every wrong operator, in the order of computation.

    `model` is the learner's model in the engine's dtype. `engine_results` are the results of the engine's operators for
    `token_ids`. With `exact` every bit must be equal; otherwise rounding is allowed. Raises `EngineError` if the shapes
    do not fit the model."""
    own_results, reference = _compute_alone(model, token_ids, engine_results), {}
    if not exact:
        reference = _compute_alone(_in_double(model), token_ids, engine_results)
    found: list[Finding] = []
    unseen: list[str] = []
    for name, result in own_results.items():
        if name not in engine_results:
            unseen.append(name)
            continue
        one = _judge(name, result, engine_results[name], reference.get(name), tuple(unseen))
        if one is not None:
            found.append(one)
        unseen = []
    return found


def _compute_alone(model: Transformer, token_ids: Sequence[int], engine_results: Results) -> Results:
    """The result of each operator, computed on the engine's inputs."""
    own: Results = {}

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        own[name] = tensor
        if name not in engine_results:
            return tensor
        _check_shape(name, engine_results[name], tensor.shape)
        return engine_results[name].to(tensor.dtype)

    with torch.inference_mode():
        done = model.eval().run(
            torch.tensor(list(token_ids)),
            Packed([len(token_ids)], model.operators),
            _reported_routes(engine_results, model.config, len(token_ids)),
            hook=watch,
        )
    for at, name in enumerate(n for n in own if n.endswith("experts.used")):
        own[name] = done.live[:, at].long()  # the choice from the engine's scores, not the replayed one
    return own


def _reported_routes(engine_results: Results, of: ModelConfig, num_tokens: int) -> torch.Tensor | None:
    """The engine's experts as routes, `of.route_dtype` [T, L, K]: "missing" for layers that are not reported and for
    invalid experts. None if no layer is reported."""
    missing = missing_route(of.route_dtype)
    routes = torch.full((num_tokens, of.num_moe_layers, of.top_k), missing)
    names = [f"layers.{layer}.experts.used" for layer in of.moe_layers]
    for at, name in enumerate(names):
        if name in engine_results:
            _check_shape(name, engine_results[name], routes[:, at].shape)
            routes[:, at] = engine_results[name]
    routes[(routes < 0) | (routes >= of.num_experts)] = missing
    return routes.to(getattr(torch, of.route_dtype)) if any(name in engine_results for name in names) else None


def _check_shape(name: str, tensor: torch.Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise EngineError(
            f"the engine returned {name} with shape {list(tensor.shape)}",
            f"the learner computes {list(expected)}",
            hint="use the same checkpoint and the same version of etude for both",
        )


def _in_double(model: Transformer) -> Transformer:
    twin = Transformer(model.config, seed=None, dtype=torch.float64, operators=Native(torch.float64))
    with torch.no_grad():
        for copy, original in zip(hf_views(twin).values(), hf_views(model).values(), strict=True):
            copy.copy_(original)
    return twin


def _judge(
    name: str, own: torch.Tensor, engine: torch.Tensor, true: torch.Tensor | None, unseen: tuple[str, ...]
) -> Finding | None:
    if not own.dtype.is_floating_point:
        differs = _rows((own.sort(-1).values != engine.sort(-1).values).to(torch.float64)).any(1)
        return _finding(name, differs.double(), 0.0, unseen)
    if true is None:
        return _finding(name, _error(engine.double(), own.double()), 0.0, unseen)
    dtype = engine.dtype
    own = own.to(dtype)  # the engine's dtype may be coarser: that is rounding, too
    rounding = torch.finfo(dtype).eps * (0.51 if name.endswith(PRODUCTS) else 1.02)
    for slack in (0.0, rounding):
        engine_error, own_error = (_error(x.double(), true.double(), slack) for x in (engine, own))
        if found := _finding(name, engine_error, MAX_RATIO * max(float(own_error.max()), _EPSILON), unseen):
            return found
    engine_error, own_error = (_total_error(x.double(), true.double()) for x in (engine, own))
    return _finding(name, engine_error, MAX_RATIO_ALL * max(float(own_error), _EPSILON), unseen)


def _finding(name: str, error_T: torch.Tensor, allowed: float, unseen: tuple[str, ...]) -> Finding | None:
    error_T = torch.nan_to_num(error_T, nan=torch.inf)
    worst = float(error_T.max())
    if worst <= allowed:
        return None
    return Finding(name, worst, allowed, int(error_T.argmax()), int((error_T > allowed).sum()), unseen)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(tensor.shape[0], -1)


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(_rows(tensor), dim=1)
    return norms


def _error(found: torch.Tensor, true: torch.Tensor, slack: float = 0.0) -> torch.Tensor:
    """[T]: norm of a row's error divided by the norm of the row; relative errors of elements up to `slack` are
    ignored."""
    beyond = ((found - true).abs() - true.abs() * slack).clamp_min(0)
    return _norms(beyond) / _norms(true).clamp_min(torch.finfo(torch.float32).tiny)


def _total_error(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """[1]: relative error over all rows."""
    return _error(found.flatten()[None], true.flatten()[None])
