"""Experts of a layer stacked in one tensor, as gpt-oss's checkpoints have them. Needs torch only to compute values.

| tensor, after `mlp.experts.` | shape | content |
| --- | --- | --- |
| `gate_up_proj` | [E, D, 2F] | columns: gate, up, gate, up, ... |
| `gate_up_proj_bias` | [E, 2F] | in the same order |
| `down_proj` | [E, F, D] | |
| `down_proj_bias` | [E, D] | |

Matrices are [in, out], the transpose of etude's. In mxfp4 (`quant_method: "mxfp4"`) a matrix is not transposed:
`X_blocks` U8 [E, out, in/32, 16] has two numbers a byte, the low bits first, and `X_scales` U8 [E, out, in/32] their
exponents.

Qwen3.5's checkpoints have *plain* stacks, which are read only: `gate_up_proj` [E, 2F, D], gate before up, and
`down_proj` [E, D, F], without biases, and with matrices as etude has them.

In the model, in published versions and in files that several ranks of a learner write, each expert has tensors of its
own, as in the other families.

Shapes: E experts, D width, F expert width."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.models.components import Shape
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS

if TYPE_CHECKING:
    import torch

    from etude.models.config import ModelConfig
    from etude.models.transformer import Transformer

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of a stack's elements and block scales in mxfp4."""
PLAIN_STACK = ".experts.down_proj"
"""How the name of a plain stack of each layer ends."""
_ALTERNATING = (".experts.gate_up_proj", ".experts.gate_up_proj_bias")
_FORMAT = FORMATS[Quantise.MXFP4]
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")


@dataclass(frozen=True)
class ExpertPart:
    """One matrix or bias of one expert, as a part of a stack.

    `stack`: the name of the stack. `step`: 2 where gate and up alternate, else 1. `first`: the first row."""

    stack: str
    expert: int
    first: int
    step: int

    @property
    def is_bias(self) -> bool:
        return self.stack.endswith("_bias")


def expert_part(name: str) -> ExpertPart | None:
    """Return the place of an expert's tensor in its stack; None for the names of other tensors.

    >>> expert_part("model.layers.0.mlp.experts.3.up_proj.bias")
    ExpertPart(stack='model.layers.0.mlp.experts.gate_up_proj_bias', expert=3, first=1, step=2)
    """
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    at, expert, kind, part = found.groups()
    stack = "down_proj" if kind == "down" else "gate_up_proj"
    return ExpertPart(
        at + stack + ("_bias" if part == "bias" else ""),
        int(expert),
        first=1 if kind == "up" else 0,
        step=1 if kind == "down" else 2,
    )


def stacked_shapes(at: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each stack of a layer. `at`: the beginning of the names."""
    e, d, f = config.num_experts, config.hidden_size, config.expert_size
    yield at + "gate_up_proj", (e, d, 2 * f)
    yield at + "gate_up_proj_bias", (e, 2 * f)
    yield at + "down_proj", (e, f, d)
    yield at + "down_proj_bias", (e, d)


def plain_shapes(at: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the name and shape of each plain stack of a layer. `at`: the beginning of the names."""
    e, d, f = config.num_experts, config.hidden_size, config.expert_size
    yield at + "gate_up_proj", (e, 2 * f, d)
    yield at + "down_proj", (e, d, f)


def has_biases(part: ExpertPart, names: Container[str]) -> bool:
    """Return whether a stack is in gpt-oss's layout: plain stacks have no biases. `names`: all stored tensors."""
    return part.is_bias or f"{part.stack}_bias" in names


def read_plain(part: ExpertPart, read: Callable[[str, int], torch.Tensor]) -> torch.Tensor:
    """Read a matrix [O, I] of one expert from its plain stack. `read` is that of `read_expert`."""
    one = read(part.stack, part.expert)
    return one.chunk(2)[part.first] if part.step == 2 else one


def stacked_parts(name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
    """Return the tensors that store a stack of matrices in mxfp4: name → (dtype, shape).

    `shape`: [E, in, out]. Empty for biases, and for widths that are not a multiple of the block size."""
    if len(shape) != 3 or shape[1] % _FORMAT.block:
        return {}
    sizes = (shape[0], shape[2], shape[1] // _FORMAT.block)
    return {name + BLOCKS: ("U8", (*sizes, _FORMAT.block // 2)), name + SCALES: ("U8", sizes)}


def read_expert(part: ExpertPart, *, packed: bool, read: Callable[[str, int], torch.Tensor]) -> torch.Tensor:
    """Read a matrix [O, I] or a bias [O] of one expert from its stack.

    `packed`: whether the stack is in mxfp4; then the values are converted to float32. `read(name, index)` returns
    element `index` of the first dimension of a stored tensor."""
    rows = slice(part.first, None, part.step)
    if not packed or part.is_bias:
        one = read(part.stack, part.expert)
        return one[rows] if part.is_bias else one.mT[rows]
    from etude.numerics.quantisation import Packed, unpack

    codes, scales = (read(part.stack + suffix, part.expert)[rows].contiguous() for suffix in (BLOCKS, SCALES))
    return unpack(Packed(codes.flatten(1), scales, None), _FORMAT)


def stacked_views(model: Transformer) -> dict[str, torch.Tensor]:
    """Return every weight of a model by the name of the tensor that stores it, as detached views.

    If gate and up alternate in the file, the view has a last dimension of two for them, since [E, D, 2F] cannot be a
    view. `as_stored` converts it."""
    from etude.models.transformer import Block
    from etude.models.weight_views import hf_views

    found = {name: view for name, view in hf_views(model).items() if expert_part(name) is None}
    outside = model.config.architecture.hf_name
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if block.experts is None:
            continue
        at, stack = outside(f"model.layers.{layer}.mlp.experts."), block.experts.stack
        assert stack.gate_up_bias is not None
        assert stack.down_bias is not None
        held, _, width = stack.gate_up.shape
        found[at + "gate_up_proj"] = stack.gate_up.detach().view(held, 2, -1, width).permute(0, 3, 2, 1)  # [E, D, F, 2]
        found[at + "gate_up_proj_bias"] = stack.gate_up_bias.detach().view(held, 2, -1).mT
        found[at + "down_proj"] = stack.down.mT.detach()
        found[at + "down_proj_bias"] = stack.down_bias.detach()
    return found


def as_stored(name: str, view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `stacked_views`, or any other tensor, in its shape in a file, contiguous."""
    return (view.flatten(-2) if name.endswith(_ALTERNATING) else view).contiguous()
