"""The command ``etude parity``: compare the log-probabilities of an engine and the learner on one checkpoint."""

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

from etude.cli.locations import console, existing_path, open_run
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
    """Compare an engine with the learner, and print the result.

    Returns exit code 0 if they are equal, or in native mode within the budget; otherwise 1."""
    from etude.evals.doctor.diagnosis import Verdict, examine
    from etude.evals.doctor.page import write_page
    from etude.evals.doctor.sides import LearnerSide

    settings = _settings(args)
    checkpoint, same_dtype = settings.checkpoint, settings.dtype == settings.learner_dtype
    dtypes = settings.dtype if same_dtype else f"{settings.dtype}, {settings.learner_dtype} in the learner"
    print(f"{checkpoint}: {settings.mode}, {dtypes}, quantise {settings.quant}", file=sys.stderr, flush=True)
    learner = _model(settings, settings.learner_dtype)
    prompts = _prompts(args, checkpoint, learner.config)
    engine = _engine(args, settings)
    found = examine(
        engine,
        LearnerSide(learner),
        prompts,
        max_tokens=args.tokens,
        seed=args.seed,
        exact=settings.mode == "exact",
        budget=settings.budget,
        report=lambda line: print(line, file=sys.stderr, flush=True),
        reference=learner if same_dtype else _model(settings, settings.dtype),
    )
    if args.out is not None:
        write_page(args.out, found, title=f"{args.checkpoint.name} · {dtypes} · {settings.mode}")
    if args.json:
        print(json.dumps(found.plain(), indent=2))
    else:
        _show(found)
    return Exit.FAILED if found.verdict is Verdict.OFF else Exit.DONE


@dataclass(frozen=True)
class Settings:
    """The settings of one comparison: `dtype` and `quant` (quantisation) of the engine, and the dtype of the learner.

    `mode` is "exact", where results must be equal, or "native", where they may differ by `budget`."""

    checkpoint: Path
    mode: str
    dtype: str
    learner_dtype: str
    quant: str
    budget: Budget


def _settings(args: argparse.Namespace) -> Settings:
    """The settings: from the flags, else from the run, else defaults. Raises `InputError`."""
    checkpoint, run = _checkpoint(args.checkpoint)
    own = run if args.engine is None else None  # an external engine has its own numerics
    mode = args.mode or (own.numerics.mode if own else "exact" if args.engine is None else "native")
    quant = args.quant or (own.numerics.quantise if own else "none")
    dtype = args.dtype or (run.engine.dtype if run else "float32")
    learner_dtype = args.learner_dtype or args.dtype or (run.learner.dtype if run else "float32")
    if mode == "exact" and dtype != learner_dtype:
        facts = f"{dtype} for the engine, {learner_dtype} for the learner"
        raise InputError(
            "exact mode needs one dtype for engine and learner",
            facts,
            hint="use --mode native, or give one --dtype for both",
        )
    if mode == "native" and quant != "none":
        facts = "a difference in the last bit can round to another value, so a wrong operator cannot be found"
        raise InputError(
            f"--quant {quant} cannot be checked in native mode", facts, hint="use --mode exact, or --quant none"
        )
    return Settings(checkpoint, mode, dtype, learner_dtype, quant, _budget(args, mode, dtype, run))


def _checkpoint(path: Path) -> tuple[Path, RunConfig | None]:
    """The checkpoint, and the config of its run if a run was given. Raises `NoCheckpoint`."""
    found = existing_path(path)
    if (found / "run.json").is_file():
        from etude.loop.checkpoints import newest_checkpoint
        from etude.loop.config import read_config

        run = open_run(found)
        return newest_checkpoint(run), read_config(run)
    if not (found / "config.json").is_file():
        raise NoCheckpoint(
            f"{found} is not a checkpoint",
            "it has no config.json",
            hint="give a Hugging Face directory, or a run",
        )
    return found, None


def _model(settings: Settings, dtype: str, *, packed: bool = False) -> Transformer:
    """Load the checkpoint. `packed`: with weights decoded from bytes, as in an engine."""
    import torch

    from etude.models import load_model
    from etude.models.packed_weights import PackedWeights
    from etude.numerics import Mode, NumericsConfig, Quantise
    from etude.numerics.factory import operators_for
    from etude.numerics.formats import FORMATS

    numerics = NumericsConfig(Mode(settings.mode), Quantise(settings.quant))
    kind: torch.dtype = getattr(torch, dtype)
    model = load_model(
        settings.checkpoint, dtype=kind, operators=operators_for(numerics, kind, rounds_weights=not packed)
    )
    if packed and settings.quant != "none":
        PackedWeights(model, FORMATS[numerics.quantise]).decode()
    return model


def _engine(args: argparse.Namespace, settings: Settings) -> EngineSide:
    import torch

    if args.engine is None:
        from etude.evals.doctor.sides import ReferenceEngineSide

        return ReferenceEngineSide(_model(settings, settings.dtype, packed=True))
    if args.engine == "transformers":
        from etude.evals.doctor.transformers_engine import TransformersEngine

        return TransformersEngine.load(settings.checkpoint, getattr(torch, settings.dtype))
    if not args.engine.startswith(("http://", "https://")):
        raise InputError(f"--engine {args.engine} is not an engine", hint="give a URL, or the word transformers")
    from etude.evals.doctor.remote import at_url

    return at_url(args.engine, token=os.environ.get("ETUDE_TOKEN"))


def _budget(args: argparse.Namespace, mode: str, dtype: str, run: RunConfig | None) -> Budget:
    from etude.evals.parity import Budget, budget_of

    if args.k3 is not None and not 0 <= args.k3 < math.inf:
        raise InputError(f"--k3 {args.k3} is not valid", hint="give a number of at least 0, such as 1e-3")
    if mode == "exact":
        return Budget(0.0, 0.0)
    usual = budget_of(dtype) if run is None else run.parity.budget(dtype)
    return usual if args.k3 is None else Budget(args.k3, usual.ratio_p99)


def _prompts(args: argparse.Namespace, checkpoint: Path, sizes: ModelConfig) -> list[list[int]]:
    """Token ids of prompts with different lengths, so that batches are ragged. Raises `InputError`."""
    import numpy as np

    if args.tokens + 1 > min(MAX_TOKENS, sizes.context_tokens):
        raise InputError(
            f"--tokens {args.tokens} does not fit",
            f"the checkpoint has {sizes.context_tokens} positions, and this command allows {MAX_TOKENS}",
            hint="give a smaller --tokens",
        )
    random = np.random.default_rng(args.seed)
    longest = min(96, sizes.context_tokens - args.tokens)
    lengths = random.integers(1, longest, args.prompts, endpoint=True).tolist()
    if args.text is None:
        return [random.integers(0, sizes.vocab_size, n).tolist() for n in lengths]
    ids = _tokenised(args.text, checkpoint)
    if ids[0] < 0 or max(ids) >= sizes.vocab_size:
        raise InputError(
            f"token {max(ids)} of {args.text} is not in the vocabulary",
            f"the model has {sizes.vocab_size} tokens",
            hint="use the tokenizer.json of this checkpoint",
        )
    starts = random.integers(0, max(1, len(ids) - longest), args.prompts).tolist()
    return [ids[s : s + n] for s, n in zip(starts, lengths, strict=True)]


def _tokenised(text: Path, checkpoint: Path) -> list[int]:
    from tokenizers import Tokenizer

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text} cannot be read as text", str(error), hint="give a UTF-8 file") from None
    try:
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises a bare Exception
        raise NoCheckpoint(
            f"{checkpoint} has no tokenizer", str(error), hint="remove --text: prompts are then random tokens"
        ) from None
    ids: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
    if not ids:
        raise InputError(f"{text} is empty", hint="give a file with text, or remove --text")
    return ids


_COLUMNS = (
    *("way", "tokens", "differing", "mean |Δ|", "k1", "k3", "p99 |r-1|", "max |r-1|", "flipped"),
    "k3 replayed",
)
_MAX_FINDINGS = 8  # that are printed


def _show(found: Diagnosis) -> None:
    from etude.evals.parity import LEGEND

    screen = console()
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
    for off in found.findings[:_MAX_FINDINGS]:
        unseen = f" (or one of {', '.join(off.unseen)}, which the engine does not report)" if off.unseen else ""
        screen.print(
            f"wrong: {off.name}{unseen}: error {_number(off.error)}, allowed by rounding {_number(off.allowed)}"
        )
    if len(found.findings) > _MAX_FINDINGS:
        screen.print(f"and {len(found.findings) - _MAX_FINDINGS} more operators")
    if not found.shown:
        screen.print(f"{found.engine} does not report its operators, so the cause of a difference cannot be located")
    screen.print(_verdict(found), style="bold")


def _verdict(found: Diagnosis) -> str:
    from etude.evals.doctor.diagnosis import Verdict

    match found.verdict:
        case Verdict.EQUAL:
            return f"{found.engine} and the learner compute identical bits"
        case Verdict.NEAR:
            limits = f"k3 at most {found.budget.k3:g}, p99 |r-1| at most {found.budget.ratio_p99:g}"
            operators = "each operator within its rounding" if found.shown else "operators not compared"
            return f"{found.engine} and the learner differ only by rounding: {limits}; {operators}"
    if found.findings:
        return f"{found.engine} and the learner differ; the first wrong operator is {found.findings[0].name}"
    limits = f"k3 {found.budget.k3:g} or p99 |r-1| {found.budget.ratio_p99:g}"
    what = "must be equal in exact mode, and are not" if found.exact else f"differ by more than {limits}"
    return f"{found.engine} and the learner {what}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def bars(one: Parity) -> Sequence[tuple[str, int, str]]:
    """Return the histogram of differences as lines (label, count, bar), without empty bins at both ends."""
    from etude.evals.parity import edges

    bounds = edges()
    labels = ["equal", f"< {bounds[0]:.0e}", *(f">= {a:.1e}" for a in bounds)]
    filled = [i for i, count in enumerate(one.histogram) if count]
    most = max(one.histogram)
    return [
        (labels[i], one.histogram[i], "█" * math.ceil(40 * one.histogram[i] / most))
        for i in range(filled[0], filled[-1] + 1)
    ]
