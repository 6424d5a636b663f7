"""Snapshots of a mixture of experts in training, from which deltas are measured. Made once, kept under `build/`.

etude's own model, 24.7M parameters, reads the standard library's source for a while; then branches train on from there,
each with an optimiser and a learning rate of its own: AdamW, and Muon for the matrices. The gradients are a policy's:
of each byte the model draws one, is rewarded where it is the right one, and reinforced by how much better than average
that was. Masters are float32, and the forward sees them rounded to bf16. Matrices begin with a standard deviation of
.02, as those of large models have: a small model's own are larger, so that fewer of them would change.

Of each branch the versions 0, 1, 4 and 16 steps from the start are kept, of one all; in bf16, in fp8 (e4m3, blocks of
128 × 128 with a float32 scale) and in 4 bits (e2m1, blocks of 16 with an e4m3 scale, one float32 scale a tensor), the
last two quantised from the masters by rounding to nearest. Takes some minutes.
`python -m benchmarks.weights.delta_pairs [--folder build/delta_pairs]`
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import report
from etude.models import ModelConfig, Transformer, hf_views
from etude.models.attention import Packed
from etude.training.config import LiveWeights
from etude.training.optimizer import AdamW
from etude.weights import Tensor

FOLDER = Path(__file__).parents[2] / "build" / "delta_pairs"
SIZES = ModelConfig(
    vocab_size=256, hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=2, head_dim=32, expert_size=320,
    num_experts=16, context_tokens=128,
)  # fmt: skip
BRANCHES = {
    "adamw-1e-7": 1e-7,
    "adamw-1e-6": 1e-6,
    "adamw-3e-6": 3e-6,
    "adamw-1e-5": 1e-5,
    "adamw-3e-5": 3e-5,
    "muon-3e-6": 3e-6,
}
WHOLE_BRANCH = "adamw-1e-6"
"""Of this one every version is kept: a chain."""

FORMATS = ("bf16", "fp8", "fp4")
STEPS = (1, 4, 16)
PRETRAIN_STEPS, WARM_STEPS = 80, 20
ROWS, ROW_TOKENS = 8, 128
STD, DECAY = 0.02, 0.01
_F32, _U8 = torch.float32, torch.uint8


@dataclass(frozen=True)
class Pair:
    """Two versions of one branch in one format, `steps` apart."""

    format: str
    branch: str
    steps: int
    old: list[Tensor]
    new: list[Tensor]

    @property
    def name(self) -> str:
        return f"{self.format}/{self.branch}/{self.steps}"

    @property
    def num_bytes(self) -> int:
        """Of one snapshot."""
        return sum(tensor.num_bytes for tensor in self.new)


def names() -> list[str]:
    """Of all pairs: format, branch, steps."""
    return [f"{form}/{branch}/{steps}" for form in FORMATS for branch in BRANCHES for steps in STEPS]


def load(name: str, folder: Path = FOLDER) -> Pair:
    """A pair by name; everything is trained first where it is not there yet."""
    make(folder)
    form, branch, steps = name.split("/")
    old, new = (_read(folder, f"{branch}-{step:02d}", form) for step in (0, int(steps)))
    return Pair(form, branch, int(steps), old, new)


def versions(folder: Path = FOLDER) -> Iterator[dict[str, Tensor]]:
    """All versions of one branch in bf16, step by step, the start among them; 1.2 % change in a step."""
    make(folder)
    for step in range(max(STEPS) + 1):
        tensors = _read(folder, f"{WHOLE_BRANCH}-{step:02d}", "bf16")
        yield {f"t{i:04d}": tensor for i, tensor in enumerate(tensors)}


def make(folder: Path = FOLDER) -> None:
    """Train all branches and keep their versions; nothing where that was done before."""
    done = folder / "made.json"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    run = Training(torch.from_numpy(corpus()))
    for step in range(PRETRAIN_STEPS):
        cooling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / PRETRAIN_STEPS))
        run.read(1e-3 * min(1.0, (step + 1) / 10) * cooling)
    for _ in range(WARM_STEPS):
        run.reinforce(1e-6)
    start = {name: value.clone() for name, value in run.optimizer.state().items()}
    for branch, lr in BRANCHES.items():
        run.begin(start, muon=branch.startswith("muon"))
        _keep(folder, run, branch, 0)
        for step in range(1, max(STEPS) + 1):
            rewarded = run.reinforce(lr)
            if step in STEPS or branch == WHOLE_BRANCH:
                _keep(folder, run, branch, step)
        print(f"{branch}: {rewarded:.3f} right, {time.perf_counter() - started:.0f} s so far", file=sys.stderr)
    done.write_text(json.dumps({"parameters": SIZES.num_parameters, "seconds": time.perf_counter() - started}) + "\n")


def corpus() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Python's standard library, file after file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).copy()


class Training:
    """One model, its optimiser, and what it reads. Seeded."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text, self.generator = text, torch.Generator().manual_seed(0)
        self.model = Transformer(SIZES, seed=0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, STD, generator=self.generator)
        self.optimizer = AdamW(self.model, weights=LiveWeights.BF16, betas=(0.9, 0.999), weight_decay=DECAY)
        self.muon: Muon | None = None

    def begin(self, state: dict[str, torch.Tensor], *, muon: bool) -> None:
        """Go back to a state, for another branch."""
        self.generator.manual_seed(1)
        self.optimizer.restore(state, live=False)
        self.muon = Muon(self) if muon else None
        for _ in range(WARM_STEPS // 4 if self.muon else 0):
            self._policy_gradient()
            self.muon.gather()
            self.optimizer.clear()

    def read(self, lr: float) -> None:
        """A step towards the next byte of some text."""
        logits, targets, balance = self._forward()
        (F.cross_entropy(logits, targets) + 0.01 * balance).backward()
        self.optimizer.step(lr)

    def reinforce(self, lr: float) -> float:
        """A step of reinforcement learning; the share of bytes that were right."""
        right = self._policy_gradient()
        if self.muon:
            self.muon.step(lr)
        else:
            self.optimizer.step(lr)
        return right

    def _policy_gradient(self) -> float:
        logits, targets, _ = self._forward()
        logprobs = logits.log_softmax(-1)
        drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=self.generator)
        reward = (drawn[:, 0] == targets).to(_F32)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        (-(logprobs.gather(1, drawn)[:, 0] * advantage).mean()).backward()
        return float(reward.mean())

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - ROW_TOKENS - 1, (ROWS,), generator=self.generator).tolist()
        rows = torch.stack([self.text[start : start + ROW_TOKENS + 1] for start in starts]).long()
        done = self.model.train().run(rows[:, :-1].reshape(-1), Packed([ROW_TOKENS] * ROWS, self.model.operators))
        assert done.balance is not None
        return done.logits, rows[:, 1:].reshape(-1), done.balance


class Muon:
    """Orthogonalised momentum for the matrices of the blocks (Jordan 2024), scaled to AdamW's size (arXiv 2502.16982);
    AdamW for all else."""

    def __init__(self, run: Training) -> None:
        self.optimizer = run.optimizer
        self.parts: list[tuple[slice, torch.Size]] = []
        at = 0
        for name, parameter in run.model.named_parameters():
            if parameter.ndim > 1 and name.startswith("blocks") and "router" not in name:
                self.parts.append((slice(at, at + parameter.numel()), parameter.shape))
            at += parameter.numel()
        self.momentum = torch.zeros_like(self.optimizer.state()["master"])

    @torch.no_grad()
    def gather(self) -> None:
        """Add the gradient to the momentum."""
        self.momentum.mul_(0.95).add_(self.optimizer.grad)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """What `AdamW.step` does, with another step for the matrices."""
        self.gather()
        ahead = self.optimizer.grad + 0.95 * self.momentum
        before = self.optimizer.state()["master"].clone()
        self.optimizer.step(lr)
        for part, shape in self.parts:
            turned = orthogonal(ahead[part].view(-1, *shape[-2:])).reshape(-1)
            size = lr * 0.2 * math.sqrt(max(shape[-2:]))
            self.optimizer.state()["master"][part] = before[part] * (1 - lr * DECAY) - size * turned
        self.optimizer.live.copy_(self.optimizer.state()["master"].bfloat16())


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """[B, R, C] nearly the nearest matrices with equal singular values: five steps of Newton and Schulz."""
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


# formats


def quantised(master: dict[str, torch.Tensor], form: str) -> list[Tensor]:
    """A checkpoint in one format: norms, router and embeddings stay in bf16, as engines keep them."""
    found: list[Tensor] = []
    for name, value in master.items():
        kept = value.ndim < 2 or form == "bf16" or "mlp.gate." in name or "embed" in name or "head" in name
        found += [_tensor("bf16", value.bfloat16())] if kept else {"fp8": _fp8, "fp4": _fp4}[form](value)
    return found


def _fp8(value: torch.Tensor) -> list[Tensor]:
    rows, cols = value.shape
    padded = F.pad(value, (0, -cols % 128, 0, -rows % 128))
    blocks = padded.view(len(padded) // 128, 128, -1, 128)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp_min(1e-12)
    codes = (blocks / scale).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :cols].contiguous()
    return [_tensor("f8_e4m3", codes), _tensor("f32", scale[:, 0, :, 0])]


def _fp4(value: torch.Tensor) -> list[Tensor]:
    blocks = value.reshape(len(value), -1, 16)
    most = (blocks.abs().max() / (6 * 448)).clamp_min(1e-12)
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / most).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.to(_F32) * most).clamp_min(1e-12)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), middles).to(_U8) | (scaled < 0).to(_U8) << 3
    codes = codes.view(len(value), -1, 2)
    packed = codes[..., 0] | codes[..., 1] << 4
    return [_tensor("f4_e2m1x2", packed), _tensor("f8_e4m3", scale[..., 0].contiguous()), _tensor("f32", most)]


def _tensor(dtype: str, value: torch.Tensor) -> Tensor:
    kind = {1: _U8, 2: torch.int16, 4: torch.int32}[value.element_size()]
    codes = value.contiguous().view(-1).view(kind).numpy()
    return Tensor(dtype, tuple(value.shape), codes.view(f"u{codes.itemsize}"))


# files: a format's codes one after another, and what they are


def _keep(folder: Path, run: Training, branch: str, step: int) -> None:
    master = dict(zip(hf_views(run.model), _split(run), strict=True))
    for form in FORMATS:
        if form != "bf16" and step and step not in STEPS:
            continue
        tensors = quantised(master, form)
        (folder / f"{form}.json").write_text(json.dumps([[t.dtype, t.shape] for t in tensors]) + "\n")
        np.concatenate([t.codes.view(np.uint8) for t in tensors]).tofile(folder / f"{branch}-{step:02d}.{form}")


def _split(run: Training) -> list[torch.Tensor]:
    """The masters as Hugging Face names them: views of the model are turned to the masters and back."""
    parameters = list(run.model.parameters())
    live = [parameter.data for parameter in parameters]
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, master in zip(parameters, torch.split(run.optimizer.state()["master"], sizes), strict=True):
        parameter.data = master.view_as(parameter)
    found = list(hf_views(run.model).values())
    for parameter, data in zip(parameters, live, strict=True):
        parameter.data = data
    return found


def _read(folder: Path, name: str, form: str) -> list[Tensor]:
    data = np.fromfile(folder / f"{name}.{form}", np.uint8)
    tensors, at = [], 0
    for dtype, shape in json.loads((folder / f"{form}.json").read_text()):
        width = {"bf16": 2, "f32": 4}.get(dtype, 1)
        end = at + math.prod(shape) * width
        tensors.append(Tensor(dtype, tuple(shape), data[at:end].copy().view(f"u{width}")))
        at = end
    return tensors


# what changes


def changed_share(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """Share of items that differ: of numbers, where two are packed in a code."""
    changed = total = 0
    for before, after in zip(old, new, strict=True):
        differ = before.codes ^ after.codes
        packed = after.dtype == "f4_e2m1x2"
        nibbles = (differ & 15, differ >> 4) if packed else (differ,)
        changed += sum(int(np.count_nonzero(part)) for part in nibbles)
        total += len(nibbles) * differ.size
    return changed / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    shares = {}
    for name in names():
        pair = load(name, args.folder)
        shares[name] = round(changed_share(pair.old, pair.new), 6)
    report("delta_pairs", {"model": SIZES.to_hf(), "parameters": SIZES.num_parameters, "changed_share": shares})


if __name__ == "__main__":
    main()
