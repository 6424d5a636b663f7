"""Bytes a parameter that a learner's process takes, and what an optimiser step costs, by setting.

After a small model has run, for all that is loaded once, each setting has a process of its own, forked from that one.
It loads a model of about seventy million parameters, and takes a step on a short text, so that activations are small
beside what is kept. `resident` is the growth of the process's resident memory (VmRSS) after this step, and `peak`
that of its peak (VmHWM), which loading and a step's temporary tensors raise. `kept` counts the tensors of model,
gradient and optimiser; `host` those beside them that a learner on a GPU has in host memory. `planned` is what `etude
plan` counts for the device. All are bytes a parameter of the model. `step_ratio`: CPU time of an optimiser step over
that of float32, for each trained number.

`python -m benchmarks.learner.memory [--settings "float32" ...]`; half a minute on an idle core
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
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
from etude.records import Batch
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import Masters, Moments

SMALL = ModelConfig(
    vocab_size=512, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, expert_size=128,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
LARGE = ModelConfig(
    vocab_size=4096, hidden_size=768, num_layers=4, num_heads=12, num_kv_heads=4, head_dim=64, expert_size=768,
    num_experts=8, top_k=2, context_tokens=512,
)  # fmt: skip
NATIVE, TOKENS, STEPS = NumericsConfig(mode=Mode.NATIVE), 16, 2
M_MMAP_THRESHOLD = -3
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


def stepped(name: str, start: Path, batch: Batch) -> TorchLearner:
    """A learner with a setting after one step."""
    config, numerics = SETTINGS[name]
    learner = TorchLearner(config, numerics=numerics, refuse_mismatch=False)
    learner.load(start)
    learner.forward_backward(batch)
    learner.optim_step()
    return learner


def measure(name: str, start: Path, batch: Batch, answer: Connection) -> None:
    """Send what the process of one setting takes."""
    config, numerics = SETTINGS[name]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    learner = stepped(name, start, batch)
    resident, peak = memory_bytes("VmRSS") - before, memory_bytes("VmHWM") - before
    optimizer, number = learner.optimizer, learner.model.config.num_parameters
    bases = learner.trainable.module.bases.values() if isinstance(learner.trainable.module, Adapters) else []
    device = [*learner.model.parameters(), optimizer.live, optimizer.grad, *optimizer.state().values()]
    training = training_of(config, numerics)
    planned = weights_bytes(LARGE, training, 1) + optimiser_bytes(LARGE, training, 1)
    took = []
    for _ in range(STEPS):
        optimizer.grad.normal_()
        began = time.process_time()
        optimizer.step(1e-6)
        took.append(time.process_time() - began)
    answer.send(
        {
            "resident": resident / number,
            "peak": peak / number,
            "kept": stored(device) / number,
            "host": stored(bases) / number,
            "planned": planned / number,
            "parameters": number,
            "trained": optimizer.grad.numel(),
            "step_s": min(took),
        }
    )


def stored(tensors: Any) -> int:
    """Bytes of the memory of tensors; what they share counts once."""
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # freed tensors return to the system at once
    rows, fork = {}, multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        for start, sizes in ((small, SMALL), (large, LARGE)):
            save_model(Transformer(sizes, seed=0), start, dtype="bf16")
        (batch,) = batches(small, [TOKENS], steps=1, numerics=NATIVE, dtype="bfloat16")
        for name in args.settings:
            stepped(name, small, batch)
        for name in args.settings:
            receive, answer = fork.Pipe(duplex=False)
            child = fork.Process(target=measure, args=(name, large, batch, answer))
            child.start()
            answer.close()
            rows[name] = receive.recv()
            child.join()
            print(name, rows[name], file=sys.stderr, flush=True)
    parameters = {row.pop("parameters") for row in rows.values()}
    for row in rows.values():
        base = next(iter(rows.values()))
        ratio = row["step_s"] / row["trained"] / (base["step_s"] / base["trained"])
        row |= {key: round(value, 4 if key == "step_s" else 2) for key, value in row.items() if key != "trained"}
        row["step_ratio"] = round(ratio, 2)
    report("memory", {"parameters": parameters.pop(), "tokens": TOKENS, "bytes_a_parameter": rows})


if __name__ == "__main__":
    main()
