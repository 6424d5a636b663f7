"""A model of each family in exact mode on a device; what its programs are compiled to; that the benchmark runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from benchmarks.gpu.exact import Shape, Size, measure
from tests.unit.models.families import FAMILIES

from etude.models import Transformer
from etude.models.attention import Packed
from etude.numerics.gpu import ExactGpu, PackedTokens, PagedTokens, Pages, SequenceRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_model_decodes_to_the_bits_it_is_trained_with(family: str) -> None:
    sizes, dtype = FAMILIES[family], torch.bfloat16
    model = Transformer(sizes, seed=0, operators=ExactGpu(dtype)).to(DEVICE)
    lengths = [11, 6]
    tokens = torch.arange(17, device=DEVICE) * 7 % sizes.vocab_size
    trained = model.run(tokens, PackedTokens(lengths, DEVICE)).logits.detach()
    one_by_one = Packed(lengths, model.operators, device=DEVICE)
    assert torch.equal(model.run(tokens, one_by_one).logits, trained)
    kept = sizes.cache_layout
    pages = Pages(
        num_layers=2, num_pages=8, page=4, heads=kept.heads, key_width=kept.key_width, value_width=kept.value_width,
        shared=kept.shared, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    steps = [[(0, 0, 5)], [(0, 5, 10), (1, 0, 4)], [(0, 10, 11), (1, 4, 6)]]  # sequence, from, to
    own = ((1, 3, 0), (2, 5))
    with torch.no_grad():
        for step in steps:
            rows = [SequenceRows(first, stop - first, own[i]) for i, first, stop in step]
            at = torch.cat([torch.arange(first, stop) + 11 * i for i, first, stop in step]).to(DEVICE)
            assert torch.equal(model.run(tokens[at], PagedTokens(pages, rows)).logits, trained[at])


@pytest.mark.slow
def test_the_benchmark_finds_no_differing_bit_on_a_small_layer() -> None:
    shape = Shape(width=32, heads=4, key_heads=2, head=16, experts=4, top=2, inner=16, vocabulary=50)
    size = Size(rows=(4,), most_logits=4, sequences=(2,), context=32, page=16, lengths=(9, 5), repeats=1)
    found = measure(shape, size, DEVICE)
    assert found["exact_differing"] == 0
    assert {row["operator"] for row in found["rows"]} > {"qkv", "experts", "decode", "train", "layer forward"}


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from etude.numerics.gpu.kernels import attention, matmul, row_ops

DENSE = dict(x_in=1, w_in=1, OUT=2048, IN=2048, LEAVES=2, SPLIT=False, GROUPS=0, LANES=1, GATHER=False, BAND=8)
HEADS = dict(LANES=8, PAGE=64, SHARE=8, SHARED=False, SPAN=1024, SPREAD=False)
HEADS |= dict(WIDTH=128, WIDE=128, REST=0, VALUE=128, VALUES=128)
WHOLE = dict(ROWS=128, OUTS=128, INS=64)
GRAD = dict(OUT=1536, IN=2048, GROUPED=True, GATHER=True, ROWS=64, OUTS=128, INS=128)
NORM = dict(WIDTH=128, WEIGHTED=False, ROWS=16, BLOCK=128)
for program, kind, constants, options in (
    (matmul.product, "bf16", DENSE | WHOLE, dict(num_warps=8, num_stages=3)),
    (matmul.product, "fp32", DENSE | dict(ROWS=64, OUTS=64, INS=16), dict(num_warps=4, num_stages=2)),
    (matmul.weight_gradient, "bf16", GRAD, dict(num_warps=8, num_stages=3)),
    (attention.attend, "bf16", HEADS | dict(ROWS=64, KEYS=64), dict(num_warps=4, enable_fp_fusion=False)),
    (row_ops.rms_norm, "bf16", NORM, dict(enable_fp_fusion=False)),
):
    names = program.arg_names
    pointers = {n: "*" + kind for n in ("x", "w", "y", "q", "k", "v", "o", "dy")} | {"dw": "*fp32", "weight": "*fp32"}
    pointers |= {n: "*i32" for n in ("source", "starts", "tile_starts", "positions", "pages")}
    pointers |= {"lse": "*fp32", "marks": "*fp32", "scales": "*fp32", "eps": "fp32", "scale": "fp32"}
    kinds = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    wide = [i for i, n in enumerate(names) if "*" in kinds[n] or n.endswith(("_row", "_head", "_page"))]
    aligned = {(i,): [["tt.divisibility", 16]] for i in wide}
    source = ASTSource(program, kinds, {(names.index(n),): value for n, value in constants.items()}, aligned)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    seen = [word for word in ("wgmma", "cp.async", "tf32", "fma.rn.f32") if word in ptx]
    print(program.fn.__name__, kind, *seen)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_programs_compile_for_hopper_to_its_matrix_unit_and_never_to_tf32(tmp_path: Path) -> None:
    there = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=there, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "product bf16 wgmma cp.async",
        "product fp32 cp.async fma.rn.f32",
        "weight_gradient bf16 wgmma cp.async",
        "attend bf16 wgmma cp.async",
        "rms_norm bf16",
    ]
