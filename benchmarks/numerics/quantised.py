"""What low precision costs and keeps, format by format: parity, error, speed, bytes.

- *differing bits*: rollouts sampled by the real engine (three turns of a session, prefix reuse, mixed batches) from
  packed weights, each log-probability compared with the learner's packed forward from unrounded ones. The goal is 0.
- *error*: of the logits against those of the same weights unrounded, and KL(unrounded ‖ rounded) a token.
- *cost*: CPU seconds of decoding and of a training step ÷ those without a format, measured alternately.
- *bytes*: of a version, and milliseconds to pack it, and to decode it in the pause of a swap.
- *torchao*: where it can be imported, shares of codes and scales that differ from its own.
- *compressed-tensors*: where it can be imported, weights that it reads otherwise out of an exported directory.

`python -m benchmarks.numerics.quantised [--start CHECKPOINT] [--rollouts 48] [--rounds 5] [--dtypes float32 bfloat16]`
Without a checkpoint the laptop example's model with random weights is taken. A few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.models.attention import Packed
from etude.models.checkpoint_files import load_tensors
from etude.models.headers import WEIGHTS
from etude.models.packed_weights import PackedWeights
from etude.models.quantised_storage import is_quantised
from etude.numerics import Mode, NumericsConfig, Quantise
from etude.numerics.config import ComputeDtype
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS
from etude.numerics.quantisation import pack
from etude.records import CompletionRequest, Sampling, Version

VERSION = Version(step=0, incarnation="00000000", digest="0" * 64)
LAPTOP = ModelConfig(context_tokens=512, tie_embeddings=True)
TURNS, SAMPLED = (40, 17, 5), 16  # prompt tokens that each turn appends; sampled ones of each
SEQUENCES = (500, 301, 457, 90, 445, 255)  # tokens, of a training step
LOW = [kind for kind in Quantise if kind is not Quantise.NONE]


@dataclass(frozen=True)
class Sides:
    """One checkpoint as both sides hold it."""

    engine: Transformer
    learner: Transformer


def sides(start: Path, numerics: NumericsConfig, dtype: torch.dtype) -> Sides:
    """The engine decodes packed bytes; the learner rounds as it goes."""
    engine = load_model(start, operators=operators_for(numerics, dtype, rounds_weights=False))
    if numerics.quantise is not Quantise.NONE:
        PackedWeights(engine, FORMATS[numerics.quantise]).decode()
    return Sides(engine.eval(), load_model(start, operators=operators_for(numerics, dtype)).train())


async def _rollout(engine: ReferenceEngine, number: int, vocab: int) -> tuple[np.ndarray[Any, Any], dict[int, float]]:
    """A session's tokens, and the engine's log-probability of each sampled one by its position."""
    draw, context, logprobs = np.random.default_rng(number), np.zeros(0, np.int32), dict[int, float]()
    for turn, size in enumerate(TURNS):
        context = np.concatenate([context, draw.integers(0, vocab, size + number % 7).astype(np.int32)])
        sampling = Sampling(max_tokens=SAMPLED + number % 5, stop_token_ids=(), seed=number)
        request = CompletionRequest(
            request_id=f"{number}.{turn}",
            session_id=str(number),
            prompt_ids=context,
            sampling=sampling,
            routes_from=max(logprobs, default=0),
        )
        done = await engine.generate(request)
        logprobs |= {len(context) + i: logprob for i, logprob in enumerate(done.logprobs.tolist())}
        context = np.concatenate([context, done.token_ids])
    return context, logprobs


async def _sampled(model: Transformer, num: int) -> list[tuple[np.ndarray[Any, Any], dict[int, float]]]:
    config = EngineConfig(context_tokens=model.config.context_tokens, max_sequences=32, chunk_tokens=64)
    async with ReferenceEngine(model, version=VERSION, config=config) as engine:
        return list(await asyncio.gather(*(_rollout(engine, n, model.config.vocab_size) for n in range(num))))


@torch.no_grad()
def parity(both: Sides, num: int) -> dict[str, Any]:
    """How many log-probabilities have other bits in the learner, and how far they are off."""
    num_tokens = num_different = 0
    worst = 0.0
    done = asyncio.run(_sampled(both.engine, num))
    for at in range(0, num, 8):
        some = done[at : at + 8]
        lengths = [len(tokens) - 1 for tokens, _ in some]
        flat = torch.cat([torch.from_numpy(tokens).long()[:-1] for tokens, _ in some])
        logits, _ = both.learner.eval()(flat, Packed(lengths, both.learner.operators))
        table = both.learner.operators.log_softmax(logits)
        for (tokens, logprobs), own in zip(some, torch.split(table, lengths), strict=True):
            found = own.gather(1, torch.from_numpy(tokens).long()[1:, None])[:, 0].numpy()
            for position, logprob in logprobs.items():
                off = abs(float(found[position - 1]) - logprob)
                num_tokens, num_different, worst = num_tokens + 1, num_different + (off != 0), max(worst, off)
    both.learner.train()
    return {"tokens": num_tokens, "differing": num_different, "worst_off": worst}


@torch.no_grad()
def error(low: Transformer, plain: Transformer, tokens: torch.Tensor) -> dict[str, float]:
    """Of logits, relative, and KL a token."""
    ours, wanted = low.eval()(tokens)[0].float(), plain.eval()(tokens)[0].float()
    p, q = wanted.log_softmax(-1), ours.log_softmax(-1)
    return {
        "logits_relative": round(float((ours - wanted).norm() / wanted.norm()), 5),
        "kl": float(f"{float((p.exp() * (p - q)).sum(-1).mean()):.4g}"),
        "same_best_token": round(float((ours.argmax(-1) == wanted.argmax(-1)).float().mean()), 4),
    }


def training_step(model: Transformer) -> Callable[[], None]:
    """Forward and backward over packed sequences."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (sum(SEQUENCES),), generator=draw)

    def step() -> None:
        model.zero_grad()
        done = model.train().run(tokens, Packed(SEQUENCES, model.operators))
        done.logits.log_softmax(-1).square().mean().backward()  # type: ignore[no-untyped-call]

    return step


def decoding(model: Transformer, num_sequences: int = 32, num_tokens: int = 48) -> Callable[[], None]:
    """The engine decodes so many sequences together."""

    async def story() -> None:
        config = EngineConfig(context_tokens=256, max_sequences=num_sequences)
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            prompt = np.arange(8, dtype=np.int32)
            sampling = Sampling(max_tokens=num_tokens, stop_token_ids=(), seed=0)
            requests = [
                CompletionRequest(request_id=str(n), session_id=str(n), prompt_ids=prompt, sampling=sampling)
                for n in range(num_sequences)
            ]
            await asyncio.gather(*map(engine.generate, requests))

    return lambda: asyncio.run(story())


def alternately(what: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in what}
    for n in range(rounds + 1):
        for name, run in what.items():
            began = time.process_time()
            run()
            if n:  # the first warms up
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def shipped(model: Transformer, kind: Quantise) -> dict[str, Any]:
    """Bytes of a version, and what packing and decoding them takes."""
    began = time.process_time()
    held = PackedWeights(model, FORMATS[kind])
    packed_s, began = time.process_time() - began, time.process_time()
    held.decode()
    decoded_s = time.process_time() - began
    num_bytes = sum(t.numel() * (t.itemsize if t.itemsize == 1 else 2) for t in held.tensors.values())
    return {"bytes": num_bytes, "pack_ms": round(packed_s * 1e3, 2), "decode_ms": round(decoded_s * 1e3, 2)}


def torchao_differs() -> dict[str, Any] | None:
    """Shares of codes and scales that torchao makes otherwise, of numbers over many powers of two."""
    if importlib.util.find_spec("torchao") is None:
        return None
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 256, generator=draw) * torch.exp2(3 * torch.randn(4096, 256, generator=draw))
    found: dict[str, Any] = {"version": importlib.metadata.version("torchao"), "numbers": x.numel()}
    for kind, element in ((Quantise.MXFP8, torch.float8_e4m3fn), (Quantise.MXFP4, torch.float4_e2m1fn_x2)):
        ours = pack(x, FORMATS[kind])
        for rule in (ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR):
            scales, codes = to_mx(x, element, 32, rule)
            found[f"{kind}, {rule.value}"] = _share(scales, ours.scales), _share(codes, ours.codes)
    ours = pack(x, FORMATS[Quantise.NVFP4], matrix=True)
    assert ours.global_scale is not None
    scales, codes = nvfp4_quantize(x, 16, ours.global_scale.reciprocal())
    found["nvfp4, our outer scale"] = _share(scales, ours.scales), _share(codes, ours.codes)
    scales, codes = nvfp4_quantize(x, 16, x.abs().max() / 2688)
    found["nvfp4, its outer scale"] = _share(scales, ours.scales), _share(codes, ours.codes)
    return found


def compressed_tensors_differs(start: Path) -> dict[str, Any] | None:
    """How many weights of an exported directory that library decodes to other numbers."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return None
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    found: dict[str, Any] = {"version": importlib.metadata.version("compressed-tensors")}
    for kind in LOW:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "low"
            save_model(load_model(start), folder, dtype="bf16", quantise=kind)
            scheme = json.loads((folder / "config.json").read_bytes())["quantization_config"]
            group = QuantizationConfig.model_validate(scheme).config_groups["group_0"]
            library, tensors = BaseCompressor.get_value_from_registry(scheme["format"]), load_tensors(folder / WEIGHTS)
            num = different = 0
            for name, view in hf_views(load_model(folder)).items():
                if is_quantised(name):
                    stem = name.removesuffix("weight")
                    own = {n.removeprefix(stem): tensor for n, tensor in tensors.items() if n.startswith(stem)}
                    different += int((library.decompress(own, group)["weight"].float() != view).sum())
                    num += view.numel()
            found[str(kind)] = {"weights": num, "differing": different}
    return found


def _share(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    return round(float((theirs.view(torch.uint8).flatten() != ours.flatten()).float().mean()), 5)


def measure(start: Path, *, rollouts: int, rounds: int, dtypes: list[ComputeDtype]) -> dict[str, Any]:
    """All of it, for one checkpoint."""
    formats: dict[str, dict[str, Any]] = {str(kind): {} for kind in Quantise}
    held = {kind: sides(start, NumericsConfig(Mode.EXACT, kind), torch.float32) for kind in Quantise}
    plain = held[Quantise.NONE].learner
    tokens = torch.randint(0, plain.config.vocab_size, (400,), generator=torch.Generator().manual_seed(1))
    for kind in Quantise:
        own = formats[str(kind)]
        for dtype in dtypes:
            exact = sides(start, NumericsConfig(Mode.EXACT, kind), getattr(torch, dtype))
            own[f"exact, {dtype}"] = parity(exact, rollouts)
        own["native, float32"] = parity(sides(start, NumericsConfig(Mode.NATIVE, kind), torch.float32), rollouts)
        if kind in LOW:
            own["error"] = error(held[kind].learner, plain, tokens)
            own["shipped"] = shipped(load_model(start), kind)
    training = alternately({str(k): training_step(both.learner) for k, both in held.items()}, rounds)
    decoded = alternately({str(k): decoding(both.engine) for k, both in held.items()}, rounds)
    for name, own in formats.items():
        own["training_ratio"] = round(training[name] / training["none"], 3)
        own["decode_ratio"] = round(decoded[name] / decoded["none"], 3)
    return {"formats": formats, "training_cpu_s": training, "decode_cpu_s": decoded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, help="a checkpoint; else random weights")
    parser.add_argument("--rollouts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", type=ComputeDtype, default=[ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        start = args.start
        if start is None:
            start = Path(scratch) / "random"
            model = Transformer(LAPTOP, seed=7)
            with torch.no_grad():
                model.embedding.mul_(3)  # sharp predictions, so that a wrong number would show
            save_model(model, start, dtype="bf16")
        theirs = compressed_tensors_differs(start)
        numbers = measure(start, rollouts=args.rollouts, rounds=args.rounds, dtypes=args.dtypes)
    exact = [own[name] for own in numbers["formats"].values() for name in own if name.startswith("exact")]
    report(
        "quantised",
        {
            "start": "random weights" if args.start is None else args.start.name,
            "differing_bits": sum(found["differing"] for found in exact),
            "tokens_compared": sum(found["tokens"] for found in exact),
            **numbers,
            "torchao_differs_in_scales_and_codes": torchao_differs(),
            "compressed_tensors": theirs,
        },
    )


if __name__ == "__main__":
    main()
