"""Which operator is off: each one computed alone, on the inputs that the engine gave it.

The learner's model runs over the same tokens while every result is replaced by the engine's. So what it computes for
an operator comes from the engine's inputs of that operator, and the two results differ by that operator's own error;
errors of earlier ones do not count. In exact mode any differing bit names the operator.

Elsewhere an error is judged by the rounding that it may have. The same is computed in float64, with the same
replacements; how far the engine lies from that is set against how far our own operator lies, in the same dtype, on
the same inputs. Two numbers are kept for each token: the relative error, and the *excess*, what is left of it once
each element may be rounded to the dtype, once in a product, twice elsewhere (a norm before and after its weight). A
wrong constant of 1e-5 is far under bf16's rounding and shows in neither: it shows in float32.

What the engine does not show (a vendor's fused kernel) counts into the next result that it does.

Shapes: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etude.errors import EngineError
from etude.inference.watched import Results
from etude.models import ModelConfig, Packed, Transformer, hf_views
from etude.numerics import Native
from etude.records.completion import missing_route

TIMES, TIMES_ALL = 6.0, 2.5
"""How many times our own error an engine's may be, in its worst row and over all of them: kernels round in between, in
another order. Clean models of both families in three dtypes come to 1.2 (tests/unit/evals/test_doctor.py)."""

_LEAST = float(torch.finfo(torch.float32).eps)

PRODUCTS = ("qkv", "inward", ".q", "expanded", ".out", "scores", "gate_up", "down", "logits")
"""How the names end of results that are rounded once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An operator whose result is not what its inputs give."""

    name: str  # "layers.3.attention.qkv"
    error: float  # relative error of the worst row
    allowed: float  # what rounding in this dtype may give; 0 in exact mode
    position: int  # of the worst row
    num_rows: int  # rows that are off
    unseen: tuple[str, ...]  # operators before it that the engine does not show: it may be one of them

    @property
    def layer(self) -> int | None:
        """The number of the operator's layer; None outside of the layers."""
        head, _, rest = self.name.partition(".")
        return int(rest.partition(".")[0]) if head == "layers" else None


def findings(model: Transformer, token_ids: Sequence[int], theirs: Results, *, exact: bool) -> list[Finding]:
    """Every operator that is off, in the order of computing.

    `model` is the learner's, in the engine's dtype. `theirs` are the engine's results for all of `token_ids`. Raises
    `EngineError` for results of other shapes.
    """
    ours, reference = _alone(model, token_ids, theirs), {}
    if not exact:
        reference = _alone(_in_double(model), token_ids, theirs)
    found: list[Finding] = []
    unseen: list[str] = []
    for name, mine in ours.items():
        if name not in theirs:
            unseen.append(name)
            continue
        one = _judged(name, mine, theirs[name], reference.get(name), tuple(unseen))
        if one is not None:
            found.append(one)
        unseen = []
    return found


def _alone(model: Transformer, token_ids: Sequence[int], theirs: Results) -> Results:
    """Every operator's result on the engine's inputs."""
    own: Results = {}

    def watch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        own[name] = tensor
        if name not in theirs:
            return tensor
        _check_shape(name, theirs[name], tensor.shape)
        return theirs[name].to(tensor.dtype)

    with torch.inference_mode():
        done = model.eval().run(
            torch.tensor(list(token_ids)),
            Packed([len(token_ids)], model.operators),
            _replayed(theirs, model.config, len(token_ids)),
            hook=watch,
        )
    for at, name in enumerate(n for n in own if n.endswith("experts.used")):
        own[name] = done.live[:, at].long()  # the choice from the engine's scores, not the replayed one
    return own


def _replayed(theirs: Results, of: ModelConfig, num_tokens: int) -> torch.Tensor | None:
    """The engine's experts as routes, `of.route_dtype` [T, L, K]: missing for a layer that is not shown, and where
    there is no such expert. None where no layer is shown."""
    missing = missing_route(of.route_dtype)
    routes = torch.full((num_tokens, of.num_moe_layers, of.top_k), missing)
    names = [f"layers.{layer}.experts.used" for layer in of.moe_layers]
    for at, name in enumerate(names):
        if name in theirs:
            _check_shape(name, theirs[name], routes[:, at].shape)
            routes[:, at] = theirs[name]
    routes[(routes < 0) | (routes >= of.num_experts)] = missing
    return routes.to(getattr(torch, of.route_dtype)) if any(name in theirs for name in names) else None


def _check_shape(name: str, tensor: torch.Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise EngineError(
            f"an engine shows {name} as {list(tensor.shape)}",
            f"the learner computes {list(expected)}",
            hint="see that both have the same checkpoint; take engine and doctor of one release",
        )


def _in_double(model: Transformer) -> Transformer:
    """The same weights in float64, computed plainly."""
    twin = Transformer(model.config, seed=None, dtype=torch.float64, operators=Native(torch.float64))
    with torch.no_grad():
        for mine, theirs in zip(hf_views(twin).values(), hf_views(model).values(), strict=True):
            mine.copy_(theirs)
    return twin


def _judged(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, true: torch.Tensor | None, unseen: tuple[str, ...]
) -> Finding | None:
    if not mine.dtype.is_floating_point:
        differs = _rows((mine.sort(-1).values != theirs.sort(-1).values).to(torch.float64)).any(1)
        return _finding(name, differs.double(), 0.0, unseen)
    if true is None:
        return _finding(name, _error(theirs.double(), mine.double()), 0.0, unseen)
    dtype = theirs.dtype
    mine = mine.to(dtype)  # where theirs is the coarser one: that is a rounding, too
    rounding = torch.finfo(dtype).eps * (0.51 if name.endswith(PRODUCTS) else 1.02)
    for slack in (0.0, rounding):
        its, own = (_error(one.double(), true.double(), slack) for one in (theirs, mine))
        if found := _finding(name, its, TIMES * max(float(own.max()), _LEAST), unseen):
            return found
    its, own = (_whole(one.double(), true.double()) for one in (theirs, mine))
    return _finding(name, its, TIMES_ALL * max(float(own), _LEAST), unseen)


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
    """[T]: root mean square of a row's error over that of the row, each element's first `slack` forgiven."""
    beyond = ((found - true).abs() - true.abs() * slack).clamp_min(0)
    return _norms(beyond) / _norms(true).clamp_min(torch.finfo(torch.float32).tiny)


def _whole(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """[1]: the relative error of all rows together."""
    return _error(found.flatten()[None], true.flatten()[None])
