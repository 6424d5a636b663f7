"""Tokens a second of the reference engine, against transformers and vLLM at their best, on one thread.

Two random Qwen3-MoE models of 9.2M parameters (16 experts, top-4; 4 layers of 256 and 6 layers of 192), one of 99M (24
experts, top-4; 8 layers of 512), and the laptop example's; prompts of 64 tokens, 128 sampled tokens each. The reference
engine is measured whole, in float32, eager, exact and native: asyncio face, log-probabilities, routes, spans. Others
sample alone, and none of them is exact:

- transformers: plain batched `generate` (all prompts are equally long: nothing is padded) with a dynamic and a static
  cache, and `generate_batch` (continuous batching); in float32 and bfloat16; with each implementation of the experts.
  Every way samples `TRIAL_TOKENS` of each sequence once for each batch size, after a warm-up; one that is a third as
  fast as another in a shorter trial has that one alone. So does the best one with a static cache under torch.compile.
  The two best ways by CPU time and the best one by wall time are then measured in full.
- vLLM's CPU build (`--vllm DIR`, an environment of its own, made where there is none; `--install` does that alone): in
  float32 and bfloat16, eager and compiled, on one core.

Wall and CPU seconds are of the engine's process; best of `--repeats`, all of them taking turns.
`ratio_to_best_peer` is etude's tokens a second ÷ those of the fastest peer at that batch size, whatever its dtype, by
wall and by CPU time; `ratio_to_best_float32_peer` ÷ those of the fastest in etude's dtype.

Rows are kept as they are measured (`benchmarks.journal`): the same command goes on where it ended.
`python -m benchmarks.inference.engine [--models NAME ...] [--batches 1,16,64] [--repeats N] [--dtypes float32 bfloat16]
[--vllm DIR] [--fresh]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.journal import Journal
from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.engine import ReferenceEngine
from etude.inference.external.environment import environment
from etude.inference.external.install import install
from etude.models import ModelConfig, Transformer
from etude.models.checkpoint import save_model
from etude.numerics import Native
from etude.numerics.exact.operators import Exact
from etude.numerics.operators import Operators
from etude.records import CompletionRequest, Sampling, Version

PROMPT_TOKENS, SAMPLED_TOKENS, TRIAL_TOKENS, SHORT_TOKENS = 64, 128, 32, 4
BIG = {"vocab_size": 4096, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_experts": 16, "top_k": 4}
MODELS = {
    "9.2M, 4 layers of 256": ModelConfig(**BIG, hidden_size=256, num_layers=4, expert_size=128),
    "9.2M, 6 layers of 192": ModelConfig(**BIG, hidden_size=192, num_layers=6, expert_size=128),
    "laptop": ModelConfig(),
    "99M, 8 layers of 512": ModelConfig(
        vocab_size=16384,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        num_experts=24,
        top_k=4,
        hidden_size=512,
        num_layers=8,
        expert_size=256,
    ),
}
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # transformers' implementations of the mixture
DTYPES = ("float32", "bfloat16")  # of the others
PAGE_TOKENS = 64  # of continuous batching
FEW = 4  # sequences
MODES: dict[str, Callable[[], Operators]] = {"exact": Exact, "native": Native}  # of etude
SHORT = "tokens_per_cpu_s_in_the_short_trial"
VLLM_LIMIT_S = 900.0  # for an answer, compiling included
VLLM_MODES = ("eager", "compiled")

Run = Callable[[int, int], None]
"""Sample so many tokens after each of so many prompts."""


@dataclass(frozen=True)
class Way:
    """A way to sample with transformers."""

    experts: str
    dtype: str = "float32"
    cache: str = "dynamic"  # or static, compiled (a static one under torch.compile), paged (continuous batching)

    @property
    def name(self) -> str:
        return f"{self.dtype}, {self.cache} cache, {self.experts}"


WAYS = [
    *(Way(e, dtype, cache) for dtype in DTYPES for cache in ("dynamic", "static") for e in EXPERTS),
    *(Way(e, cache="paged") for e in EXPERTS),
]


def ways_for(batch: int, dtypes: Sequence[str] = DTYPES) -> list[Way]:
    """What is tried at a batch size. `batched_mm` copies the experts of each token: at 16 sequences it makes a tenth of
    the tokens that the others make."""
    return [way for way in WAYS if way.dtype in dtypes and (way.experts != "batched_mm" or batch <= FEW)]


def prompts(number: int, vocab_size: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    rng = np.random.default_rng(number)
    return [rng.integers(3, vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(number)]


def ours(sizes: ModelConfig, model: Transformer) -> Run:
    config = EngineConfig(context_tokens=PROMPT_TOKENS + SAMPLED_TOKENS)

    async def serve(number: int, sampled: int) -> None:
        async with ReferenceEngine(model, version=Version(0, "0" * 8, "0" * 64), config=config) as engine:
            requests = (
                CompletionRequest(
                    request_id=f"r{i}",
                    session_id=f"r{i}",
                    prompt_ids=prompt,
                    sampling=Sampling(max_tokens=sampled, stop_token_ids=(), seed=i),
                )
                for i, prompt in enumerate(prompts(number, sizes.vocab_size))
            )
            done = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert all(len(c.token_ids) == sampled for c in done)

    return lambda number, sampled: asyncio.run(serve(number, sampled))


def theirs(sizes: ModelConfig, folder: Path, way: Way) -> Run:
    """transformers in one way."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, way.dtype), attn_implementation="sdpa", experts_implementation=way.experts
    ).eval()
    options: dict[str, Any] = {}
    if way.cache in ("static", "compiled"):
        options |= {"cache_implementation": "static", "max_cache_len": PROMPT_TOKENS + SAMPLED_TOKENS}  # one shape
    if way.cache == "compiled":
        options["compile_config"] = transformers.CompileConfig(mode="default")
        options["compile_config"]._compile_all_devices = True  # on a CPU it compiles only when it is told to

    def serve(number: int, sampled: int) -> None:
        config = transformers.GenerationConfig(
            max_new_tokens=sampled, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, **options
        )
        inputs = np.stack(prompts(number, sizes.vocab_size)).astype(np.int64)
        if way.cache == "paged":
            room = transformers.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=number * (-(-(PROMPT_TOKENS + sampled) // PAGE_TOKENS) + 1),
                max_batch_tokens=number * PROMPT_TOKENS,
            )  # by itself it takes nearly all memory, and most of its time for that
            done = model.generate_batch(
                inputs.tolist(), generation_config=config, continuous_batching_config=room, progress_bar=False
            )
            assert [len(o.generated_tokens) for o in done.values()] == [sampled] * number
        else:
            ids = torch.from_numpy(inputs)
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert made.shape == (number, PROMPT_TOKENS + sampled)

    return serve


def make_environment(folder: Path) -> Path:
    """vLLM's interpreter, of the version that etude's adapter was tested with; installed where it is not there."""
    place = environment(folder)
    install(place, "cpu", report=lambda line: print(line, file=sys.stderr))
    return place.python


class Vllm:
    """vLLM on the same weights and prompts, in a process of its own that samples a batch when it is asked to."""

    def __init__(self, python: Path, model: str, batches: Sequence[int], dtype: str, mode: str) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        folder, sizes = Path(self._scratch.name), MODELS[model]
        save_model(Transformer(sizes, seed=0), folder / "model", dtype="f32")
        asked = folder / "prompts.json"
        asked.write_text(json.dumps({b: [p.tolist() for p in prompts(b, sizes.vocab_size)] for b in batches}))
        argv = [str(python), str(Path(__file__).with_name("vllm_engine.py")), "--model", str(folder / "model")]
        argv += ["--prompts", str(asked), "--sampled", str(SAMPLED_TOKENS), "--dtype", dtype, "--mode", mode]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.name = f"{self._answer()['vllm']}, {dtype}, {mode}"

    def timed(self, batch: int) -> tuple[float, float]:
        """Tokens a wall second and a CPU second."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % batch)
        spent = self._answer()
        return batch * SAMPLED_TOKENS / spent["wall_s"], batch * SAMPLED_TOKENS / spent["cpu_s"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._scratch.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], VLLM_LIMIT_S)[0]:
            raise SystemExit(f"vLLM did not answer within {VLLM_LIMIT_S:g} s")
        return dict(json.loads(self._process.stdout.readline() or b"{}"))


def timed(run: Run, number: int, sampled: int) -> tuple[float, float]:
    """Tokens a wall second and a CPU second."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(number, sampled)
    tokens = number * sampled
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def speeds(wall: float, cpu: float) -> dict[str, float]:
    return {"tokens_per_s": round(wall, 1), "tokens_per_cpu_s": round(cpu, 1)}


def measure(
    model: str, batch: int, repeats: int, ways: Sequence[Way], compiles: bool, peers: Sequence[Vllm] = ()
) -> dict[str, Any]:
    """etude, vLLM and transformers at one batch size; `compiles`: also the best way that can be compiled."""
    sizes = MODELS[model]
    made = {mode: Transformer(sizes, seed=0, operators=operators()) for mode, operators in MODES.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_model(made["exact"], Path(folder) / "model", dtype="f32")
        runs, tried = {mode: ours(sizes, model) for mode, model in made.items()}, dict[str, Any]()
        for way in (*ways, *([None] if compiles else [])):
            way = way or compiled(ways, tried)
            runs[way.name] = theirs(sizes, Path(folder) / "model", way)
            tried[way.name] = tried_out(runs[way.name], batch, best_of(tried))
        kept = {name: partial(timed, runs[name], batch, SAMPLED_TOKENS) for name in [*MODES, *promising(tried)]}
        kept |= {peer.name: partial(peer.timed, batch) for peer in peers}
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in kept}
        for turn in range(repeats + 1):  # the first one warms up
            for name, run in kept.items():
                found = run()
                seen[name] += [found] if turn else []
    best = {name: speeds(max(w for w, _ in found), max(c for _, c in found)) for name, found in seen.items()}
    of_etude = {mode: best.pop(mode) for mode in MODES}
    of_vllm = {peer.name: best.pop(peer.name) for peer in peers}
    return {"etude": of_etude, "vllm": of_vllm, "transformers": best, "transformers_tried": tried}


def tried_out(run: Run, batch: int, best_cpu: float) -> dict[str, float]:
    """The speed of a way in a trial, after a short one that warms it up (and compiles it): that one alone where it was
    several times slower than `best_cpu`, the best short one so far, in tokens a CPU second."""
    timed(run, batch, SHORT_TOKENS)
    short = timed(run, batch, SHORT_TOKENS)
    if short[1] < best_cpu / 3:
        return {**speeds(*short), SHORT: round(short[1], 1)}

    return {**speeds(*timed(run, batch, TRIAL_TOKENS)), SHORT: round(short[1], 1)}


def compiled(ways: Sequence[Way], tried: Mapping[str, Mapping[str, float]]) -> Way:
    """The way to try with torch.compile: the best one with a static cache, by CPU time. Experts in a loop, whose length
    hangs on the data, cannot be compiled as one graph."""
    able = [way for way in ways if way.cache == "static" and way.experts != "eager"]
    best = max(able, key=lambda way: tried[way.name]["tokens_per_cpu_s"])
    return Way(best.experts, best.dtype, "compiled")


def best_of(tried: Mapping[str, Mapping[str, float]]) -> float:
    """The best short trial, in tokens a CPU second."""
    return max((found[SHORT] for found in tried.values()), default=0.0)


def promising(tried: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The two best ways of a trial by CPU time, and the best one by wall time; each once."""
    by_cpu = sorted(tried, key=lambda name: -tried[name]["tokens_per_cpu_s"])[:2]
    by_wall = sorted(tried, key=lambda name: -tried[name]["tokens_per_s"])[:1]
    return [*by_cpu, *(name for name in by_wall if name not in by_cpu)]


def against(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with what is fastest beside etude, by wall and by CPU time, and the ratio of each of etude's modes."""
    peers = {f"transformers, {name}": found for name, found in row["transformers"].items()}
    peers |= {f"vLLM, {name}": found for name, found in row["vllm"].items()}
    return {
        **row,
        **_best(row, peers, ""),
        **_best(row, {name: found for name, found in peers.items() if "float32" in name}, "float32_"),
    }


def _best(row: Mapping[str, Any], peers: Mapping[str, Mapping[str, float]], kind: str) -> dict[str, Any]:
    units = ("tokens_per_s", "tokens_per_cpu_s") if peers else ()
    names = {unit: max(peers, key=lambda name: peers[name][unit]) for unit in units}
    ratios = {
        mode: {unit: round(own[unit] / peers[name][unit], 2) for unit, name in names.items()}
        for mode, own in row["etude"].items()
    }
    return {f"best_{kind}peer": names, f"ratio_to_best_{kind}peer": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="of vLLM and transformers")
    parser.add_argument("--vllm", type=Path, help="vLLM's virtual environment")
    parser.add_argument("--vllm-modes", nargs="+", choices=VLLM_MODES, default=VLLM_MODES)
    parser.add_argument("--install", action="store_true", help="make that environment, and nothing else")
    parser.add_argument("--no-transformers", action="store_true", help="leave out transformers; needs --no-compile")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes a minute a row")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    args = parser.parse_args()
    python = make_environment(args.vllm) if args.vllm else None
    if args.install:
        return
    if args.no_transformers and not args.no_compile:
        parser.error("--no-transformers leaves nothing to compile: give --no-compile, too")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    batches, journal, rows = [int(b) for b in args.batches.split(",")], Journal("engine", fresh=args.fresh), []
    for model in args.models:
        peers: list[Vllm] = []
        for batch in batches:
            key = {"model": model, "batch": batch, "repeats": args.repeats, "compiled": not args.no_compile}
            key |= {"dtypes": args.dtypes, "vllm": args.vllm_modes if python else []}
            key |= {"transformers": False} if args.no_transformers else {}

            def row(batch: int = batch, model: str = model, peers: list[Vllm] = peers) -> dict[str, Any]:
                if python and not peers:
                    peers += [Vllm(python, model, batches, *way) for way in product(args.dtypes, args.vllm_modes)]
                ways = () if args.no_transformers else ways_for(batch, args.dtypes)
                return measure(model, batch, args.repeats, ways, not args.no_compile, peers)

            rows.append(against({"model": model, "batch": batch, **journal.once(key, row)}))
        for peer in peers:
            peer.close()
    facts = {"threads": 1, "torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    report("engine", {**facts, "prompt_tokens": PROMPT_TOKENS, "sampled_tokens": SAMPLED_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
