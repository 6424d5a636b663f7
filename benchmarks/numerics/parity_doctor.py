"""Does the parity doctor name what is wrong? Faults that engines have had are planted, one at a time.

For each plant (benchmarks/numerics/planted.py) × family × dtype × mode an engine that has it computes a text from its
cache, and `evals.doctor.local.findings` is asked. *Named*: the first finding is one of the operators that are right to
blame. Three kinds are counted apart:

- *far*: beyond the dtype's rounding, or any differing bit in exact mode. All of them should be named.
- *near*: within the rounding of a clean kernel in that dtype: nobody can be asked to tell.
- *void*: the fault changes no bit there (bf16 tables where they are bf16 anyhow).

*False alarms*: clean engines of every family × dtype × mode, several seeds, with ties among experts and without.

`python -m benchmarks.numerics.parity_doctor [--seeds 4] [--tokens 64]`: 20 s of one core.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.numerics.planted import PLANTS, PROMPT, Plant, tied
from benchmarks.report import report
from etude.evals.doctor.local import Finding, findings
from etude.inference.operator_trace import Results, engine_results
from etude.models import ModelConfig, Transformer
from etude.numerics import Mode, NumericsConfig
from etude.numerics.factory import operators_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learner(sizes: ModelConfig, dtype: torch.dtype, mode: Mode, seed: int) -> Transformer:
    """Random weights, norms and biases too, that are `dtype`'s numbers."""
    model = Transformer(sizes, seed=seed, operators=operators_for(NumericsConfig(mode), dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.normal_(1.0, 0.1, generator=generator)
            weight.copy_(weight.to(dtype))
        for name, bias in model.named_buffers():
            if name.endswith("bias"):
                bias.normal_(0.0, 0.1, generator=generator)
    return model.eval()


def text(sizes: ModelConfig, num_tokens: int, seed: int) -> list[int]:
    tokens = torch.randint(0, sizes.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed + 1000))
    return [*range(8), *tokens[8:].tolist()]


def examined(
    model: Transformer, plant: Plant, tokens: list[int], clean: Results, *, exact: bool
) -> tuple[bool, list[Finding]]:
    """Whether the fault changes a bit of the `clean` engine's, and what the doctor says."""
    if plant.both is not None:
        model = copy.deepcopy(model)
        plant.both(model)
        clean = engine_results(model, tokens, prompt_tokens=PROMPT)
    engine = copy.deepcopy(model)
    plant.put(engine)
    theirs = engine_results(engine, tokens, prompt_tokens=PROMPT)
    return _differ(clean, theirs), findings(model, tokens, theirs, exact=exact)


def _differ(a: Results, b: Results) -> bool:
    return a.keys() != b.keys() or any(not torch.equal(one, b[name]) for name, one in a.items())


def cases() -> Iterator[tuple[str, ModelConfig, str, Mode]]:
    for family, (sizes, _) in PLANTS.items():
        for dtype in DTYPES:
            for mode in Mode:
                yield family, sizes, dtype, mode


def planted(num_tokens: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    for family, sizes, dtype, mode in cases():
        model, tokens = learner(sizes, DTYPES[dtype], mode, seed), text(sizes, num_tokens, seed)
        clean = engine_results(model, tokens, prompt_tokens=PROMPT)
        for plant in PLANTS[family][1]:
            differs, found = examined(model, plant, tokens, clean, exact=mode is Mode.EXACT)
            near = mode is Mode.NATIVE and dtype in plant.near
            rows.append(
                {
                    "plant": plant.name,
                    "family": family,
                    "dtype": dtype,
                    "mode": str(mode),
                    "kind": ("near" if near else "far") if differs else "void",
                    "named": bool(found) and plant.blames(found[0].name),
                    "blamed": found[0].name if found else None,
                    "also": len(found[1:]),
                }
            )
    return rows


def alarms(num_tokens: int, num_seeds: int) -> list[dict[str, Any]]:
    """What is blamed in engines that have no fault."""
    rows = []
    for family, sizes, dtype, mode in cases():
        blamed = []
        for seed in range(num_seeds):
            model, tokens = learner(sizes, DTYPES[dtype], mode, seed), text(sizes, num_tokens, seed)
            for ties in (False, True):
                if ties:
                    tied(model)
                theirs = engine_results(model, tokens, prompt_tokens=PROMPT)
                blamed += [f.name for f in findings(model, tokens, theirs, exact=mode is Mode.EXACT)]
        cell = {"family": family, "dtype": dtype, "mode": str(mode)}
        rows.append({**cell, "engines": 2 * num_seeds, "false_alarms": len(blamed), "blamed": blamed})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="of clean engines, each family, dtype and mode")
    parser.add_argument("--seed", type=int, default=0, help="of the engines with faults")
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = planted(given.tokens, given.seed)
    clean = alarms(given.tokens, given.seeds)
    far = [row for row in rows if row["kind"] == "far"]
    plants = {plant.name: plant for _, all_of in PLANTS.values() for plant in all_of}
    report(
        "parity_doctor",
        {
            "plants": {name: {"right": plant.right, "in_bf16": plant.why} for name, plant in plants.items()},
            "cases": {kind: _counted([r for r in rows if r["kind"] == kind]) for kind in ("far", "near", "void")},
            "far_by_dtype_and_mode": {
                f"{dtype} {mode}": _counted([r for r in far if (r["dtype"], r["mode"]) == (dtype, str(mode))])
                for dtype in DTYPES
                for mode in Mode
            },
            "misnamed": [row for row in far if not row["named"]],
            "near": [row for row in rows if row["kind"] == "near"],
            "void": [row for row in rows if row["kind"] == "void"],
            "clean_engines": sum(row["engines"] for row in clean),
            "false_alarms": sum(row["false_alarms"] for row in clean),
            "clean": clean,
        },
    )


def _counted(rows: list[dict[str, Any]]) -> dict[str, int]:
    blamed = sum(row["blamed"] is not None for row in rows)
    return {"cases": len(rows), "named": sum(row["named"] for row in rows), "blamed": blamed}


if __name__ == "__main__":
    main()
