"""Native operators on a device: right against float64, one kernel for ragged sequences, and no wait in a training step.

What Triton computes runs by its interpreter where there is no GPU; the vendor's kernels need one.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.models.experts import Choice
from etude.models.experts import mix as on_the_host
from etude.numerics import grouped_experts, varlen_attention
from etude.numerics.gpu import row_ops
from etude.numerics.native import Native
from etude.numerics.operators import Operators

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BF16 = torch.bfloat16
TRITON = grouped_experts.RowOps(row_ops.gated, row_ops.gated_gradient, row_ops.combine)
on_a_gpu = pytest.mark.skipif(not GPU, reason="no GPU here: the vendor's kernels need one")
SMALL = ModelConfig(
    vocab_size=512, hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, expert_size=128,
    num_experts=16, top_k=4, context_tokens=512,
)  # fmt: skip


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1.2e-2) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.1e}"


def mixed(work: grouped_experts.RowOps | None, tokens: int, width: int, experts: int, inner: int) -> list[torch.Tensor]:
    """A layer's experts, all gradients: by a way of devices, or (None) on the host in float64. Expert 1 has no row."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    scores[:, 1] = -1.0
    experts_NK = scores.topk(2, -1).indices
    given = [
        drawn(tokens, width, seed=2),
        drawn(tokens, 2, seed=3, dtype=torch.float32).softmax(-1),
        drawn(experts, 2 * inner, width, seed=4).float() * width**-0.5,
        drawn(experts, width, inner, seed=5).float() * inner**-0.5,
    ]
    given = [(one if work else one.double()).requires_grad_() for one in given]
    x, gates, up, down = given
    if work is None:
        y = on_the_host(x, Choice(gates, experts_NK, experts_NK, None), up, down, Native(torch.float64))
    else:
        y = grouped_experts.mix(x, gates, experts_NK, up, down, work)
    slope = drawn(tokens, width, seed=6).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, given, slope)]


@pytest.mark.parametrize("work", [grouped_experts.TORCH_ROW_OPS, TRITON], ids=["torch", "triton"])
def test_a_layers_experts_are_right_forward_and_back(work: grouped_experts.RowOps) -> None:
    sizes = (999, 512, 16, 256) if GPU else (7, 16, 4, 8)
    for found, expected in zip(mixed(work, *sizes), mixed(None, *sizes), strict=True):
        close(found, expected)


@on_a_gpu
def test_experts_take_the_device_s_way_and_few_rows_do_too() -> None:
    assert grouped_experts.row_ops_for(DEVICE).gated is row_ops.gated
    for tokens in (1, 3, 130):
        for found, expected in zip(
            mixed(grouped_experts.row_ops_for(DEVICE), tokens, 256, 8, 128),
            mixed(None, tokens, 256, 8, 128),
            strict=True,
        ):
            close(found, expected)


@on_a_gpu
@pytest.mark.parametrize(("key_width", "value_width"), [(64, 64), (128, 128), (192, 128)])
def test_packed_attention_in_one_kernel_is_attention_sequence_by_sequence(key_width: int, value_width: int) -> None:
    lengths, heads, key_heads = [300, 1, 77, 513], 8, 2
    total, operators = sum(lengths), Native(BF16)
    parts = [
        drawn(total, heads, key_width, seed=1),
        drawn(total, key_heads, key_width, seed=2),
        drawn(total, key_heads, value_width, seed=3),
    ]
    parts = [part.requires_grad_() for part in parts]
    slope = drawn(total, heads, value_width, seed=4)
    one = operators.packed_attention(lengths, DEVICE)(*parts)
    each = Operators.packed(operators, lengths, DEVICE)(*parts)
    close(one, each)
    for found, expected in zip(
        torch.autograd.grad(one, parts, slope), torch.autograd.grad(each, parts, slope), strict=True
    ):
        close(found, expected)


@on_a_gpu
def test_slots_in_any_order_are_attended_up_to_what_they_hold() -> None:
    slots, room, heads, key_heads, width = 5, 256, 8, 2, 128
    keys, values = (drawn(slots, room, key_heads, width, seed=seed) for seed in (1, 2))
    asked = [(3, 1, 200), (0, 1, 1), (4, 64, 130), (1, 3, 255)]  # slot, rows, keys that the last row sees
    counts = [rows for _, rows, _ in asked]
    q = drawn(sum(counts), heads, width, seed=3)
    starts = varlen_attention.starts(counts, DEVICE)
    starts_k = torch.tensor([slot * room for slot, _, _ in asked] + [0], dtype=torch.int32).to(DEVICE)
    used = torch.tensor([stop for _, _, stop in asked], dtype=torch.int32).to(DEVICE)
    flat = (keys.flatten(0, 1), values.flatten(0, 1))
    o = varlen_attention.attend(q, *flat, starts, starts_k, max(counts), room, used_k=used)
    for (slot, rows, stop), (first, last) in zip(asked, itertools.pairwise(starts.tolist()), strict=True):
        k, v = (t[slot, :stop].repeat_interleave(heads // key_heads, 1).transpose(0, 1) for t in (keys, values))
        hidden = torch.arange(stop, device=DEVICE) > torch.arange(stop - rows, stop, device=DEVICE)[:, None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[first:last].transpose(0, 1), k, v, attn_mask=~hidden
        )
        close(o[first:last], expected.transpose(0, 1))


@on_a_gpu
def test_a_training_step_waits_for_nothing() -> None:
    model = Transformer(SMALL, seed=0, operators=Native(BF16)).to(DEVICE).train()
    tokens = torch.arange(96).to(DEVICE)
    routes = torch.zeros(96, 2, 4, dtype=torch.uint8).to(DEVICE)
    cache = Packed([64, 32], model.operators, device=DEVICE)
    model.run(tokens, cache, routes, plausible=0.5).logits.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = model.run(tokens, cache, routes, plausible=0.5)
        (model.operators.log_softmax(done.logits).mean() + done.balance).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad is not None for parameter in model.parameters())
