"""Tokens a second with speculative decoding ÷ without: ``python -m benchmarks.inference.speculation [--heads DIR]``.

With ``--heads DIR`` drafts come from an MTP head. Its model is trained for `TOKENS` bytes on the Python sources of the
standard library, and kept in DIR; it goes on with files that it was not trained on, at two temperatures. Otherwise
drafts come from look-up:

The reference engine on one thread of a CPU, with the laptop example's model and `SLOTS` slots, at several batch sizes
and for three texts. Its random weights copy nothing, so a table decides what follows: it adds `BONUS` to the logit of
the next token of the text, which then has a probability of about .98 at temperature 1. The forward pass is the
model's own.

- *copy*: the prompt is a file, and the completion writes it again.
- *edits*: the same with another token at every `EVERY`-th place.
- *new*: nothing of it was seen before. What speculation costs where it finds nothing.

Both ways take turns, after a warm-up; `ratio` is the median of the turns' ratios by wall time, `cpu_ratio` that by CPU
time of the process. Tokens, log-probabilities and routes must be the same in exact mode.
`[--repeats N] [--batches 1,8,64] [--tokens N] [--modes exact native]`
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import report
from etude.inference import EngineConfig
from etude.inference.config import Speculation
from etude.inference.engine import ReferenceEngine
from etude.inference.metrics import Counters
from etude.models import Cache, ModelConfig, Transformer, load_model
from etude.numerics.exact.operators import Exact
from etude.numerics.native import Native
from etude.records import Completion, CompletionRequest, Sampling, Version
from etude.training import MidTrainingConfig, mid_train, write_corpus

SLOTS, CONTEXT, BONUS, EVERY = 64, 1024, 12.0, 20
SIZES = ModelConfig(context_tokens=CONTEXT)
VERSION = Version(step=0, incarnation="00000000", digest="ab" * 32)
OPERATORS = {"exact": Exact, "native": Native}
CODE = ModelConfig(vocab_size=256, num_layers=6, context_tokens=CONTEXT, mtp_heads=1)
TOKENS, PROMPT = 6_000_000, 256
HEADS_GOALS = {1: 1.3, SLOTS: 0.98}
GOALS = {"copy": {1: 1.8}, "edits": {1: 1.8}, "new": {SLOTS: 0.98}}


class Writing(Transformer):
    """A model with a table that says which token follows which: `following` [V], -1 for any."""

    following: torch.Tensor

    def forward(
        self,
        tokens_N: torch.Tensor,
        cache: Cache | None = None,
        routes: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, used = super().forward(tokens_N, cache, routes, rows)
        following = self.following[tokens_N if rows is None else tokens_N[rows]]
        known = (following >= 0).nonzero()[:, 0]
        logits[known, following[known]] += BONUS
        return logits, used


def text(kind: str, num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """A prompt, and the table by which a completion of so many tokens follows it."""
    ids = np.random.default_rng(0).permutation(SIZES.vocab_size)
    file, begin = ids[:num_tokens].tolist(), int(ids[num_tokens])
    others = iter(ids[num_tokens + 1 :].tolist())
    written = list(file)
    if kind == "edits":
        written[::EVERY] = [next(others) for _ in written[::EVERY]]
    elif kind == "new":
        written = [next(others) for _ in written]
    following = torch.full((SIZES.vocab_size,), -1)
    following[[begin, *written[:-1]]] = torch.tensor(written)
    return [*file, begin], following


async def served(
    model: Transformer,
    prompts: list[list[int]],
    num_tokens: int,
    speculation: Speculation,
    temperature: float = 1.0,
) -> tuple[list[Completion], tuple[float, float], Counters]:
    """Completions of a batch, the wall and CPU seconds in which they were sampled, and the engine's counters."""
    config = EngineConfig(context_tokens=CONTEXT, max_sequences=SLOTS, speculation=speculation)
    async with ReferenceEngine(model, version=VERSION, config=config) as engine:

        def request(number: int, tokens: int) -> CompletionRequest:
            return CompletionRequest(
                request_id=f"r{number}.{tokens}",
                session_id=f"r{number}",
                prompt_ids=np.array(prompts[number], np.int32),
                sampling=Sampling(max_tokens=tokens, stop_token_ids=(), seed=number, temperature=temperature),
            )

        for tokens in (1, num_tokens):  # the first computes the prompt
            wall, cpu = time.perf_counter(), time.process_time()
            done = await asyncio.gather(*(engine.generate(request(i, tokens)) for i in range(len(prompts))))
        return done, (time.perf_counter() - wall, time.process_time() - cpu), engine.counters


def said(done: list[Completion]) -> list[Any]:
    return [(one.token_ids.tolist(), one.logprobs.tolist(), one.routes.tolist()) for one in done]


def compared(mode: str, kind: str, batch: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    model = Writing(SIZES, seed=1, operators=OPERATORS[mode]())
    prompt, model.following = text(kind, num_tokens)
    found = measured(model, [prompt] * batch, num_tokens, repeats, Speculation.LOOK_UP, must_be_same=mode == "exact")
    return {"mode": mode, "text": kind, "goal": GOALS[kind].get(batch), **found}


def sources() -> list[bytes]:
    """The modules of the standard library, in the order of their names."""
    return [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]


def trained(folder: Path, num_tokens: int) -> None:
    """Train a model of code with a head, if the folder has none. Every tenth file is held out."""
    tokens = [np.frombuffer(source, np.uint8).astype(np.int32) for source in sources()]
    train, heldout = [one for i, one in enumerate(tokens) if i % 10], tokens[::10]
    write_corpus(folder / "corpus", train, heldout=[one[:2048] for one in heldout[:4]])
    config = MidTrainingConfig(num_tokens=num_tokens, eval_every=10**6)
    mid_train(config, folder / "corpus", folder / "model", model=CODE, ranks=1)


def compared_heads(
    folder: Path, mode: str, temperature: float, batch: int, num_tokens: int, repeats: int
) -> dict[str, Any]:
    model = load_model(folder / "model", operators=OPERATORS[mode]())
    files = [list(one) for one in sources()[::10] if len(one) > 2 * PROMPT]
    prompts = [files[i % len(files)][: PROMPT + i // len(files)] for i in range(batch)]
    same = mode == "exact"
    found = measured(model, prompts, num_tokens, repeats, Speculation.HEADS, must_be_same=same, temperature=temperature)
    return {"mode": mode, "text": "code", "temperature": temperature, "goal": HEADS_GOALS.get(batch), **found}


def measured(
    model: Transformer,
    prompts: list[list[int]],
    num_tokens: int,
    repeats: int,
    speculation: Speculation,
    *,
    must_be_same: bool,
    temperature: float = 1.0,
) -> dict[str, Any]:
    ways, step_ms = (Speculation.OFF, speculation), list[float]()
    ratios, cpu_ratios = list[float](), list[float]()
    for turn in range(repeats + 1):
        found = {
            way: asyncio.run(served(model, prompts, num_tokens, way, temperature))
            for way in ways[:: -1 if turn % 2 else 1]
        }
        (before, plain_s, plain), (after, drafted_s, counters) = (found[way] for way in ways)
        same = said(before) == said(after)
        assert same or not must_be_same
        if turn:
            ratios.append(plain_s[0] / drafted_s[0])
            cpu_ratios.append(plain_s[1] / drafted_s[1])
            step_ms.append(1e3 * plain.busy_s / plain.steps)
    return {
        "batch": len(prompts),
        "ratio": round(statistics.median(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "same": same,
        "steps": {"off": plain.steps, str(speculation): counters.steps},
        "step_ms": round(statistics.median(step_ms), 3),
        "drafted": counters.drafted_tokens,
        "accepted": counters.accepted_tokens,
        "acceptance": round(counters.accepted_tokens / max(1, counters.drafted_tokens), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--modes", nargs="+", choices=OPERATORS, default=["exact", "native"])
    parser.add_argument("--heads", type=Path, metavar="DIR", help="measure an MTP head; its model is kept in DIR")
    parser.add_argument("--train-tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.heads is not None:
        trained(args.heads, args.train_tokens)
        rows = [
            compared_heads(args.heads, mode, temperature, batch, args.tokens, args.repeats)
            for mode in args.modes
            for temperature in (1.0, 0.3)
            for batch in map(int, args.batches.split(","))
        ]
        facts = {"slots": SLOTS, "tokens": args.tokens, "train_tokens": args.train_tokens, "repeats": args.repeats}
        report("speculation_heads", {**facts, "rows": rows})
        return
    rows = [
        compared(mode, kind, batch, args.tokens, args.repeats)
        for mode in args.modes
        for kind in GOALS
        for batch in map(int, args.batches.split(","))
    ]
    report("speculation", {"slots": SLOTS, "tokens": args.tokens, "repeats": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
