"""``etude parity``: an engine against the learner, on one checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from etude.cli import places
from etude.errors import Exit, InputError, NoCheckpoint

if TYPE_CHECKING:
    import torch

    from etude.evals.doctor.diagnosis import Diagnosis
    from etude.evals.doctor.sides import EngineSide
    from etude.evals.parity import Budget, Parity
    from etude.loop.config import RunConfig
    from etude.models import ModelConfig, Transformer

MAX_TOKENS = 4096


def parity(args: argparse.Namespace) -> int:
    """Exit code 0: equal, or near where that is all that was asked; 1: off."""
    from etude.evals.doctor.diagnosis import Verdict, examine
    from etude.evals.doctor.page import write_page
    from etude.evals.doctor.sides import LearnerSide

    asked = _asked(args)
    checkpoint, alike = asked.checkpoint, asked.dtype == asked.learner_dtype
    dtypes = asked.dtype if alike else f"{asked.dtype} against {asked.learner_dtype} in the learner"
    print(f"{checkpoint}: {asked.mode}, {dtypes}, quantise {asked.quant}", file=sys.stderr, flush=True)
    learner = _model(asked, asked.learner_dtype)
    prompts = _prompts(args, checkpoint, learner.config)
    engine = _engine(args, asked)
    found = examine(
        engine,
        LearnerSide(learner),
        prompts,
        max_tokens=args.tokens,
        seed=args.seed,
        exact=asked.mode == "exact",
        budget=asked.budget,
        told=lambda what: print(what, file=sys.stderr, flush=True),
        alone=learner if alike else _model(asked, asked.dtype),
    )
    if args.out is not None:
        write_page(args.out, found, title=f"{args.checkpoint.name} · {dtypes} · {asked.mode}")
    if args.json:
        print(json.dumps(found.plain(), indent=2))
    else:
        _show(found)
    return Exit.FAILED if found.verdict is Verdict.OFF else Exit.DONE


@dataclass(frozen=True)
class Asked:
    """The settings of one comparison, and the budget that its differences must stay within."""

    checkpoint: Path
    mode: str
    dtype: str  # of the engine
    learner_dtype: str
    quant: str
    budget: Budget


def _asked(args: argparse.Namespace) -> Asked:
    """Flags first, then a run's own settings, then defaults. Raises `InputError`."""
    checkpoint, run = _checkpoint(args.checkpoint)
    own = run if args.engine is None else None  # another's engine has sums and roundings of its own
    mode = args.mode or (own.numerics.mode if own else "exact" if args.engine is None else "native")
    quant = args.quant or (own.numerics.quantise if own else "none")
    dtype = args.dtype or (run.engine.dtype if run else "float32")
    learner_dtype = args.learner_dtype or args.dtype or (run.learner.dtype if run else "float32")
    if mode == "exact" and dtype != learner_dtype:
        facts = f"the engine is to compute in {dtype}, the learner in {learner_dtype}"
        raise InputError("exact mode in two dtypes", facts, hint="use --mode native, or one dtype")
    if mode == "native" and quant != "none":
        facts = "a last bit that differs may round to another number, so no error tells an operator"
        raise InputError(f"--quant {quant} in native mode", facts, hint="use --mode exact, or --quant none")
    return Asked(checkpoint, mode, dtype, learner_dtype, quant, _budget(args, mode, dtype, run))


def _checkpoint(path: Path) -> tuple[Path, RunConfig | None]:
    """The checkpoint, and the settings of the run that it is of."""
    place = places.existing(path)
    if (place / "run.json").is_file():
        from etude.loop.checkpoints import newest_checkpoint
        from etude.loop.config import read_config

        run = places.open_run(place)
        return newest_checkpoint(run), read_config(run)
    if not (place / "config.json").is_file():
        raise NoCheckpoint(f"{place} is no checkpoint", "it has no config.json", hint="give a Hugging Face directory")
    return place, None


def _model(asked: Asked, dtype: str, *, packed: bool = False) -> Transformer:
    """`packed`: with weights decoded from bytes, as an engine holds them."""
    import torch

    from etude.models import load_model
    from etude.models.packed_weights import PackedWeights
    from etude.numerics import Mode, NumericsConfig, Quantise
    from etude.numerics.factory import operators_for
    from etude.numerics.formats import FORMATS

    numerics = NumericsConfig(Mode(asked.mode), Quantise(asked.quant))
    kind: torch.dtype = getattr(torch, dtype)
    model = load_model(asked.checkpoint, dtype=kind, operators=operators_for(numerics, kind, rounds_weights=not packed))
    if packed and asked.quant != "none":
        PackedWeights(model, FORMATS[numerics.quantise]).decode()
    return model


def _engine(args: argparse.Namespace, asked: Asked) -> EngineSide:
    import torch

    if args.engine is None:
        from etude.evals.doctor.sides import OurEngine

        return OurEngine(_model(asked, asked.dtype, packed=True))
    if args.engine == "transformers":
        from etude.evals.doctor.transformers_engine import TransformersEngine

        return TransformersEngine.load(asked.checkpoint, getattr(torch, asked.dtype))
    if not args.engine.startswith(("http://", "https://")):
        raise InputError(f"--engine {args.engine} is no engine", hint="give a URL, or the word transformers")
    from etude.evals.doctor.remote import at_url

    return at_url(args.engine, token=os.environ.get("ETUDE_TOKEN"))


def _budget(args: argparse.Namespace, mode: str, dtype: str, run: RunConfig | None) -> Budget:
    from etude.evals.parity import Budget, budget_of

    if args.k3 is not None and not 0 <= args.k3 < math.inf:
        raise InputError(f"--k3 {args.k3} is no budget", hint="give a number from 0 on, such as 1e-3")
    if mode == "exact":
        return Budget(0.0, 0.0)
    usual = budget_of(dtype) if run is None else run.parity.budget(dtype)
    return usual if args.k3 is None else Budget(args.k3, usual.ratio_p99)


def _prompts(args: argparse.Namespace, checkpoint: Path, sizes: ModelConfig) -> list[list[int]]:
    """Different lengths, so that batches are ragged. Raises `InputError`."""
    import numpy as np

    if args.tokens + 1 > min(MAX_TOKENS, sizes.context_tokens):
        raise InputError(
            f"--tokens {args.tokens} does not fit",
            f"the checkpoint has positions for {sizes.context_tokens}, and {MAX_TOKENS} are the most here",
            hint="ask for fewer",
        )
    random = np.random.default_rng(args.seed)
    room = min(96, sizes.context_tokens - args.tokens)
    lengths = random.integers(1, room, args.prompts, endpoint=True).tolist()
    if args.text is None:
        return [random.integers(0, sizes.vocab_size, n).tolist() for n in lengths]
    ids = _tokenised(args.text, checkpoint)
    if ids[0] < 0 or max(ids) >= sizes.vocab_size:
        raise InputError(
            f"token {max(ids)} of {args.text} is past the vocabulary",
            f"the model has {sizes.vocab_size}",
            hint="the tokenizer.json is of another checkpoint",
        )
    starts = random.integers(0, max(1, len(ids) - room), args.prompts).tolist()
    return [ids[s : s + n] for s, n in zip(starts, lengths, strict=True)]


def _tokenised(text: Path, checkpoint: Path) -> list[int]:
    from tokenizers import Tokenizer

    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text} cannot be read as text", str(error), hint="give a UTF-8 file") from None
    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise NoCheckpoint(
            f"{checkpoint} has no tokenizer", str(error), hint="leave out --text: prompts are random tokens then"
        ) from None
    ids: list[int] = tokenizer.encode(words, add_special_tokens=False).ids
    if not ids:
        raise InputError(f"{text} is empty", hint="give a file with text, or leave out --text")
    return ids


_COLUMNS = (
    *("way", "tokens", "differing", "mean |Δ|", "k1", "k3", "p99 |r-1|", "max |r-1|", "flipped"),
    "k3 replayed",
)
_MOST = 8  # findings that are shown


def _show(found: Diagnosis) -> None:
    from etude.evals.parity import LEGEND

    screen = places.console()
    table = Table(*_COLUMNS)
    for way in found.ways:
        one = way.parity
        table.add_row(
            way.way,
            str(one.num_tokens),
            str(one.num_differing),
            *(_number(v) for v in (one.mean, one.k1, one.k3, one.ratio_p99, one.ratio_max)),
            "-" if one.flipped is None else f"{one.flipped:.2%}",
            "-" if way.replayed is None else _number(way.replayed.k3),
        )
    screen.print(table)
    screen.print(LEGEND, style="dim")
    worst = max(found.ways, key=lambda way: way.parity.k3)
    screen.print(f"|Δ| of log-probabilities, {worst.way}:")
    for label, count, bar in bars(worst.parity):
        screen.print(f"  {label:>16} {count:>8}  {bar}")
    for off in found.findings[:_MOST]:
        unseen = f" (or one of {', '.join(off.unseen)}, which it does not show)" if off.unseen else ""
        screen.print(f"off: {off.name}{unseen}: error {_number(off.error)}, rounding allows {_number(off.allowed)}")
    if len(found.findings) > _MOST:
        screen.print(f"and {len(found.findings) - _MOST} more operators")
    if not found.shown:
        screen.print(f"{found.engine} does not show its operators: what differs cannot be named")
    screen.print(_words(found), style="bold")


def _words(found: Diagnosis) -> str:
    from etude.evals.doctor.diagnosis import Verdict

    match found.verdict:
        case Verdict.EQUAL:
            return f"{found.engine} and the learner agree to the bit"
        case Verdict.NEAR:
            limits = f"k3 at most {found.budget.k3:g}, p99 |r-1| at most {found.budget.ratio_p99:g}"
            each = "each operator within its rounding" if found.shown else "its operators were not seen"
            return f"{found.engine} and the learner are as near as their rounding lets them: {limits}; {each}"
    if found.findings:
        return f"{found.engine} and the learner differ, first in {found.findings[0].name}"
    limits = f"k3 {found.budget.k3:g} or p99 |r-1| {found.budget.ratio_p99:g}"
    what = "were to be equal" if found.exact else f"are over the budget of {limits}"
    return f"{found.engine} and the learner {what}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def bars(one: Parity) -> Sequence[tuple[str, int, str]]:
    """The histogram as lines: from where there is something to where there is something."""
    from etude.evals.parity import edges

    bounds = edges()
    labels = ["equal", f"< {bounds[0]:.0e}", *(f"{a:.1e} on" for a in bounds)]
    filled = [i for i, count in enumerate(one.histogram) if count]
    most = max(one.histogram)
    return [
        (labels[i], one.histogram[i], "█" * math.ceil(40 * one.histogram[i] / most))
        for i in range(filled[0], filled[-1] + 1)
    ]
