"""Exact mode: how many bits differ between sampler, probe and learner, and what the sameness costs.

*Bits.* For both families and three dtypes, texts are sampled by an engine and then told again in every other
circumstance: alone and in company, in other chunks, with and without the cache of a turn before, by another number of
threads, as a probe, by a learner's packed forward, and by two ranks that share the model, tensor-parallel or
expert-parallel. Every log-probability is compared as bits; the goal is that none differs. The same is counted in native
mode, which shows that the comparison can find a difference.

*Cost.* The laptop example's model, exact and native taking turns: tokens decoded, prompt tokens computed and tokens
trained on a CPU second, their medians, and the quotient of the two; the same of exact mode with sums in two pieces,
for two tensor-parallel ranks, on one; and each operator by itself.

`python -m benchmarks.numerics.exact [--texts 40] [--repeats 5] [--only bits|cost]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.numerics.exact_ranks import Case, Text, learned, sharp, two_ranks
from benchmarks.report import RESULTS, commit, report
from etude.inference.config import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.models import ModelConfig, Packed, Transformer
from etude.models.components import Latent, Routing, Scores
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.numerics.parallel import Split
from etude.records import CompletionRequest, Sampling, Version

VERSION = Version(step=0, incarnation="00000000", digest="0" * 64)
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "num_layers": 3, "expert_size": 96, "top_k": 2}
FAMILIES = {
    "qwen3-moe": ModelConfig(**SIZES),
    "deepseek-v3": ModelConfig(
        **SIZES, num_heads=4, num_kv_heads=4, head_dim=48, family="deepseek_v3", dense_layers=(0,), dense_size=256,
        num_shared=1, routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=4, top_groups=2),
        latent=Latent(kv_rank=64, nope_dim=32, rope_dim=16, value_dim=32, q_rank=64),
    ),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS: tuple[type[Operators], ...] = (Exact, Native)
PARTS = {"bits": ("compared", "differing", "bits"), "cost": ("cost", "operators")}
KEPT = RESULTS / "exact.json"
SAMPLED = 96
DEADLINE_S = 3600.0  # what else a host does is no verdict
TWO_PIECES = "exact_2_pieces"


def asked(number: int, ids: Sequence[int], tokens: int, *, session: str = "", keep: bool = False) -> CompletionRequest:
    return CompletionRequest(
        request_id=f"r{number}",
        session_id=session or f"r{number}",
        prompt_ids=np.array(ids, np.int32),
        sampling=Sampling(max_tokens=tokens, stop_token_ids=(), seed=number),
        keep_session=keep,
        deadline_s=DEADLINE_S,
    )


def answered(
    model: Transformer, requests: Sequence[CompletionRequest], *, together: bool = True, **settings: int
) -> list[Any]:
    async def story() -> list[Any]:
        config = EngineConfig(context_tokens=model.config.context_tokens, **settings)  # type: ignore[arg-type]
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            if together:
                return list(await asyncio.gather(*(engine.generate(request) for request in requests)))
            return [await engine.generate(request) for request in requests]

    return asyncio.run(story())


def probed(model: Transformer, texts: Sequence[Text]) -> list[list[float]]:
    async def story() -> list[list[float]]:
        async with ReferenceEngine(model, version=VERSION) as engine:
            return [(await engine.verify(ids))[1][start - 1 :] for ids, start in texts]

    return asyncio.run(story())


def cached(model: Transformer, texts: Sequence[Text]) -> list[list[float]]:
    """The second half of each answer, sampled anew after a first turn whose keys and values stay in their slot; and the
    first half as it was."""
    firsts = [asked(i, ids[:start], SAMPLED // 2, keep=True) for i, (ids, start) in enumerate(texts)]

    async def story() -> list[list[float]]:
        config = EngineConfig(context_tokens=model.config.context_tokens, max_sequences=len(texts))
        async with ReferenceEngine(model, version=VERSION, config=config) as engine:
            before = await asyncio.gather(*(engine.generate(first) for first in firsts))
            rest = [
                asked(i, ids[: start + SAMPLED // 2], SAMPLED - SAMPLED // 2, session=f"r{i}")
                for i, (ids, start) in enumerate(texts)
            ]
            after = await asyncio.gather(*(engine.generate(request) for request in rest))
            assert all(done.num_cached for done in after), "the cache was hit"
            return [[*a.logprobs.tolist(), *b.logprobs.tolist()] for a, b in zip(before, after, strict=True)]

    return asyncio.run(story())


def differing(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[int, int]:
    """(log-probabilities compared, those with other bits)."""
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return len(pairs), sum(a != b for a, b in pairs)


def circumstances(model: Transformer, requests: list[CompletionRequest]) -> Iterator[tuple[str, list[list[float]]]]:
    """Each way to come to the same numbers; the first is what the others are compared with."""

    def sampled(**how: Any) -> list[list[float]]:
        return [done.logprobs.tolist() for done in answered(model, requests, **how)]

    done = answered(model, requests)
    texts = [
        ([*r.prompt_ids.tolist(), *d.token_ids.tolist()], len(r.prompt_ids))
        for r, d in zip(requests, done, strict=True)
    ]
    yield "together", [d.logprobs.tolist() for d in done]
    yield "alone", sampled(together=False)
    yield "in pairs", sampled(max_sequences=2)
    yield "in chunks of 17", sampled(chunk_tokens=17, step_tokens=40)
    yield "after a cached turn", cached(model, texts)
    yield "probed", probed(model, texts)
    yield "learned, packed", learned(model, texts)
    yield "learned, one by one", [scores for text in texts for scores in learned(model, [text])]
    try:
        torch.set_num_threads(2)
        yield "together, 2 threads", sampled()
        yield "learned, 2 threads", learned(model, texts)
    finally:
        torch.set_num_threads(1)


def with_degree(kind: type[Operators], dtype: torch.dtype) -> Operators:
    """Operators for two tensor-parallel ranks."""
    return Exact(dtype, degree=2) if kind is Exact else kind(dtype)


def shared(
    config: ModelConfig, kind: type[Operators], dtype: torch.dtype, requests: list[CompletionRequest]
) -> dict[str, tuple[int, int]]:
    """The same requests of two ranks, against one with the same operators: compared and differing, by circumstance."""
    cases = [
        Case(config, with_degree(kind, dtype), Split.TENSOR, requests),
        Case(config, kind(dtype), Split.EXPERT, requests),
    ]
    found = {}
    for case, told in zip(cases, two_ranks(cases), strict=True):
        one = [done.logprobs.tolist() for done in answered(sharp(config, case.operators), requests)]
        found |= {name: differing(one, other) for name, other in told.items()}
    return found


def bits(num_texts: int) -> list[dict[str, Any]]:
    rows = []
    for family, config in FAMILIES.items():
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, config.vocab_size, n) for n in generator.integers(1, 400, num_texts)]
        requests = [asked(i, prompt.tolist(), SAMPLED) for i, prompt in enumerate(prompts)]
        for dtype in DTYPES:
            for kind in KINDS:
                told = circumstances(sharp(config, kind(dtype)), requests)
                _, first = next(told)
                found = {name: differing(first, other) for name, other in told if len(other) == len(first)}
                found |= shared(config, kind, dtype, requests)
                rows.append(
                    {
                        "family": family,
                        "dtype": str(dtype).removeprefix("torch."),
                        "mode": kind.__name__.lower(),
                        "compared": sum(n for n, _ in found.values()),
                        "differing": sum(n for _, n in found.values()),
                        "by_circumstance": {name: n for name, (_, n) in found.items()},
                    }
                )
    return rows


def turns(works: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of what each gives, taking turns; a first round warms up."""
    seen: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            value = work()
            if turn:
                seen[name].append(value)
    return {name: statistics.median(values) for name, values in seen.items()}


def a_cpu_second(amount: int, work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return amount / (time.process_time() - begin)


def _compared(works: Callable[[Operators], Callable[[], float]], dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Exact and native, and how much longer exact takes: as it is, and with sums in two pieces."""
    kinds = {kind.__name__.lower(): kind(dtype) for kind in KINDS} | {TWO_PIECES: Exact(dtype, degree=2)}
    found = turns({name: works(operators) for name, operators in kinds.items()}, repeats)
    return {name: round(v, 1) for name, v in found.items()} | {
        "exact_costs": round(found["native"] / found["exact"], 3),
        f"{TWO_PIECES}_costs": round(found["native"] / found[TWO_PIECES], 3),
    }


def cost(repeats: int) -> list[dict[str, Any]]:
    config, generator = ModelConfig(), np.random.default_rng(0)

    def decoding(operators: Operators, number: int) -> Callable[[], float]:
        model = sharp(config, operators)
        requests = [asked(i, generator.integers(0, config.vocab_size, 4).tolist(), 128) for i in range(number)]
        return lambda: a_cpu_second(128 * number, lambda: answered(model, requests))

    def prefilling(operators: Operators) -> Callable[[], float]:
        model = sharp(config, operators)
        requests = [asked(i, generator.integers(0, config.vocab_size, 700).tolist(), 1) for i in range(8)]
        return lambda: a_cpu_second(700 * 8, lambda: answered(model, requests))

    def training(operators: Operators) -> Callable[[], float]:
        model = Transformer(config, operators=operators).train()
        lengths = [150, 320, 480, 90, 700, 300]
        tokens = torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))

        def step() -> None:
            done = model.run(tokens, Packed(lengths, operators))
            loss = operators.log_softmax(done.logits).gather(1, tokens[:, None]).mean()
            loss.backward()  # type: ignore[no-untyped-call]

        return lambda: a_cpu_second(sum(lengths), step)

    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for number in (1, 8, 64):
            found = _compared(lambda operators, n=number: decoding(operators, n), dtype, repeats)  # type: ignore[misc]
            rows.append({"dtype": name, "what": f"decode, {number} together", **found})
        rows.append({"dtype": name, "what": "prefill", **_compared(prefilling, dtype, repeats)})
        rows.append({"dtype": name, "what": "training step", **_compared(training, dtype, repeats)})
    return rows


def operators_alone(repeats: int) -> list[dict[str, Any]]:
    """Calls a CPU second of each operator on 1, 64 and 2048 tokens of the laptop model, float32."""
    rows = []
    weight, expert = torch.randn(256, 128), torch.randn(8, 256, 128)
    for n in (1, 64, 2048):
        x, h, scores, logits = torch.randn(n, 128), torch.randn(n, 256), torch.randn(n, 8), torch.randn(n, 768)
        heads, turn = torch.randn(n, 6, 32), torch.randn(n, 1, 32)
        counts = [n // 8 + (e < n % 8) for e in range(8)]
        q, k = torch.randn(4, min(n, 512), 32), torch.randn(2, min(n, 512), 32)
        calls: dict[str, Callable[[Operators], object]] = {
            "linear": lambda o, x=x: o.linear(x, weight),
            "linear, partial": lambda o, x=x: o.linear_partial(x, weight, 1),
            "grouped": lambda o, n=n, c=counts: o.grouped(
                torch.zeros(sum(o.padded_rows(m) for m in c if m), 128),
                expert,
                [o.padded_rows(m) if m else 0 for m in c],
            ),
            "rms_norm": lambda o, x=x: o.rms_norm(x, None, 1e-6),
            "rotate": lambda o, a=heads, b=turn: o.rotate(a, b, b),
            "gated": lambda o, h=h: o.gated(h),
            "router": lambda o, s=scores: o.top_k(o.softmax(s), 2),
            "log_softmax": lambda o, z=logits: o.log_softmax(z, 0.7),
            "attention, packed": lambda o, q=q, k=k: o.causal_attention()(q, k, k),
        }
        for name, call in calls.items():
            number = max(3, 20_000 // (n + 50))

            def works(o: Operators, call: Any = call, number: int = number) -> Callable[[], float]:
                return lambda: a_cpu_second(number, lambda: [call(o) for _ in range(number)])

            rows.append({"operator": name, "tokens": n, **_compared(works, torch.float32, repeats)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--texts", type=int, default=40, help="of each family, dtype and mode; 96 tokens sampled in each"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=list(PARTS), help="the other keeps what it had")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if args.only and KEPT.exists() else {}
    numbers: dict[str, Any] = {"torch": str(torch.__version__), "parity": Transformer(ModelConfig()).parity}
    numbers |= {key: kept[key] for key in ("commits", *(key for part in PARTS.values() for key in part)) if key in kept}
    if args.only != "cost":
        rows = bits(args.texts)
        exact = [row for row in rows if row["mode"] == "exact"]
        found = [sum(row[key] for row in exact) for key in ("compared", "differing")]
        numbers |= dict(zip(PARTS["bits"], [*found, rows], strict=True))
    if args.only != "bits":
        numbers |= dict(zip(PARTS["cost"], [cost(args.repeats), operators_alone(args.repeats)], strict=True))
    numbers["commits"] = numbers.get("commits", {}) | dict.fromkeys([args.only] if args.only else PARTS, commit())
    report("exact", numbers)


if __name__ == "__main__":
    main()
