"""Bytes a parameter that a learner's process takes, and what an optimiser step costs, by setting.

Each setting has a process of its own. After a small model has run there, for all that is loaded once, it loads a model
of about a hundred million parameters, and takes a step on a short text, so that activations are small beside what is
kept. `resident` is the growth of the process's resident memory (VmRSS) after this step, and `peak` that of its peak
(VmHWM), which loading and a step's temporary tensors raise. `kept` counts the tensors of model, gradient and optimiser;
`host` are those of them that a learner on a GPU keeps in host memory. `planned` is what `etude plan` counts for the
device. All are bytes a parameter of the model. `step_ratio`: CPU time of an optimiser step over that of float32.

`python -m benchmarks.learner.memory [--settings "float32" ...]`; about three minutes on an idle core
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.sharded_ranks import batches
from benchmarks.report import report
from etude.cli.plan import training_of
from etude.models import ModelConfig, Transformer, save_model
from etude.models.lora import Adapters
from etude.numerics.config import ComputeDtype, Mode, NumericsConfig
from etude.plan.arithmetic import optimiser_bytes, weights_bytes
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import Masters, Moments

SMALL = ModelConfig(
    vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, expert_size=128,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
LARGE = ModelConfig(
    vocab_size=8192, hidden_size=768, num_layers=6, num_heads=12, num_kv_heads=4, head_dim=64, expert_size=768,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
NATIVE, TOKENS, STEPS = NumericsConfig(mode=Mode.NATIVE), 16, 2
BASE = LearnerConfig(lr=1e-4, dtype=ComputeDtype.BFLOAT16, replay_routes=False)
COMPACT: dict[str, Any] = {"masters": Masters.BF16, "moments": Moments.INT8}
SETTINGS: dict[str, tuple[LearnerConfig, NumericsConfig]] = {
    "float32": (BASE, NATIVE),
    "8-bit moments": (replace(BASE, moments=Moments.INT8), NATIVE),
    "bf16 masters, 8-bit moments": (replace(BASE, **COMPACT), NATIVE),
    "bf16 masters, 8-bit moments, exact": (replace(BASE, **COMPACT), NumericsConfig()),
    "adapters of rank 16": (replace(BASE, lora_rank=16), NATIVE),
    "adapters of rank 16, bf16 masters, 8-bit moments": (replace(BASE, lora_rank=16, **COMPACT), NATIVE),
}


def memory_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def measure(name: str, small: Path, large: Path) -> dict[str, float]:
    """What the process of one setting takes."""
    torch.set_num_threads(1)
    config, numerics = SETTINGS[name]
    given = batches(small, [TOKENS], steps=1, numerics=NATIVE, dtype="bfloat16")
    for start in (small, large):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_bytes("VmRSS")
        learner = TorchLearner(config, numerics=numerics, refuse_mismatch=False)
        learner.load(start)
        learner.forward_backward(given[0])
        learner.optim_step()
        resident, peak = memory_bytes("VmRSS") - before, memory_bytes("VmHWM") - before
    optimizer, number = learner.optimizer, learner.model.config.num_parameters
    bases = learner.trainable.module.bases.values() if isinstance(learner.trainable.module, Adapters) else []
    device = [*learner.model.parameters(), optimizer.live, optimizer.grad, *optimizer.state().values()]
    training = training_of(config, numerics.mode)
    planned = weights_bytes(LARGE, training, 1) + optimiser_bytes(LARGE, training, 1)
    took = []
    for _ in range(STEPS):
        optimizer.grad.normal_()
        began = time.process_time()
        optimizer.step(1e-6)
        took.append(time.process_time() - began)
    return {
        "resident": resident / number,
        "peak": peak / number,
        "kept": stored(device) / number,
        "host": stored(bases) / number,
        "planned": planned / number,
        "parameters": number,
        "trained": optimizer.grad.numel(),
        "step_s": min(took),
    }


def stored(tensors: Any) -> int:
    """Bytes of the memory of tensors; what they share counts once."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # of a child: setting, two checkpoints
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], Path(args.one[1]), Path(args.one[2]))))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        starts = [Path(folder) / "small", Path(folder) / "large"]
        for start, sizes in zip(starts, (SMALL, LARGE), strict=True):
            save_model(Transformer(sizes, seed=0), start, dtype="bf16")
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # freed tensors return to the system at once
        for name in args.settings:
            argv = [sys.executable, "-m", "benchmarks.learner.memory", "--one", name, *map(str, starts)]
            done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            rows[name] = json.loads(done.stdout)
            print(name, rows[name], file=sys.stderr)
    parameters = {row.pop("parameters") for row in rows.values()}
    for row in rows.values():
        base = next(iter(rows.values()))
        ratio = row["step_s"] / row["trained"] / (base["step_s"] / base["trained"])
        row |= {key: round(value, 4 if key == "step_s" else 2) for key, value in row.items() if key != "trained"}
        row["step_ratio"] = round(ratio, 2)
    report("memory", {"parameters": parameters.pop(), "tokens": TOKENS, "bytes_a_parameter": rows})


if __name__ == "__main__":
    main()
