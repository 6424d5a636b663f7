"""A device that is not there: a model, a training step and an engine's steps on it, as far as that shows anything.

Tensors of torch's `FakeTensorMode` have a shape, a dtype and a device, and no numbers. On the device "shadow" every
operator checks that its tensors are on one device, as on a GPU, and whatever asks for a number (`item`, `tolist`, `if`)
is refused, where a GPU would be waited for. So what runs here brings no CPU tensor together with a device's and does
not wait. It shows nothing of numbers, kernels, alignment, memory or speed. Of a Triton program, which nobody runs here,
it shows that every tensor that it is given is on the device.

A program of its own, since the device is registered for the whole process: `python -m tests.shadow [exact]` prints a
line of JSON a case, its name and the error, if there is one; "exact", which needs Triton, is of exact mode.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from etude.inference.device_runner import DeviceRunner
from etude.inference.scheduler import Draft, Plan, Scheduler, Sequence
from etude.models import ModelConfig, Transformer
from etude.models.attention import Packed
from etude.numerics.native import Native
from etude.numerics.operators import Operators
from etude.records.completion import CompletionRequest, Sampling
from etude.training.config import LiveWeights, Masters, Moments
from etude.training.muon import Muon
from etude.training.optimizer import AdamW
from etude.training.process_group import SINGLE_PROCESS

NAME = "shadow"
SIZES = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, expert_size=16,
    num_experts=4, top_k=2, context_tokens=64,
)  # fmt: skip


def operators() -> Operators:
    """Those of the mode that was asked for."""
    if "exact" not in sys.argv:
        return Native(torch.bfloat16)
    from etude.numerics.gpu import ExactGpu

    return ExactGpu(torch.bfloat16)


def only_look() -> None:
    """Have Triton launch nothing, and look where the tensors of each launch are."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **named: Any) -> None:
        places = {t.device.type for t in (*args, *named.values()) if isinstance(t, torch.Tensor)}
        assert places <= {NAME}, f"{self.__name__} is given tensors on {sorted(places)}"

    JITFunction.run = run


def model(held: torch.dtype) -> Transformer:
    """On the device, in bfloat16: weights in float32 as a learner's are, or as an engine holds them."""
    device, before = torch.device(NAME), torch.get_default_dtype()
    torch.set_default_dtype(held)
    with device:
        made = Transformer(SIZES, seed=None, dtype=held, operators=operators())
    torch.set_default_dtype(before)
    made.cos, made.sin = made.cos.to(device), made.sin.to(device)
    return made


def trained(lose: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A forward over packed sequences, with replayed routes and chosen rows, and back."""
    made, device = model(torch.float32).train(), torch.device(NAME)
    tokens = torch.arange(9).to(device)
    routes = torch.zeros(9, 2, 2, dtype=torch.uint8).to(device)
    cache = Packed([5, 4], made.operators, device=device)
    done = made.run(tokens, cache, routes, torch.tensor([1, 3, 7]).to(device), plausible=0.5)
    logprobs = made.operators.log_softmax(done.logits, 0.7)
    loss = logprobs.gather(1, torch.tensor([2, 4, 8]).to(device)[:, None]).sum() + done.balance
    lose(loss).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device == parameter.device, name


def optimised() -> None:
    """A step of both optimisers with every state of blocks, kept on the device or in host memory."""
    states = itertools.product((AdamW, Muon), Masters, Moments, (False, True))
    for make, masters, moments, offload in states:
        if masters is Masters.F32 and moments is Moments.F32:
            continue  # its kernel is the vendor's
        exchange: dict[str, Any] = {"exchange": SINGLE_PROCESS} if make is Muon else {}
        optimizer = make(
            model(torch.bfloat16 if masters is Masters.BF16 else torch.float32),
            weights=LiveWeights.BF16,
            weight_decay=0.1,
            norm=lambda squares: 2.0,  # the real one is a number on the host
            masters=masters,
            moments=moments,
            offload=offload,
            **exchange,
        )
        optimizer.step(1e-3)
        kept = optimizer.kept.tensors().values()
        assert {tensor.device.type for tensor in kept} == {"cpu" if offload else NAME}
        assert optimizer.live.device.type == optimizer.grad.device.type == NAME


class CountingRunner(DeviceRunner):
    """Counts the waits, of which a step has one, and returns made-up numbers."""

    waits = 0

    def sampled(self, tokens_R: torch.Tensor, logprobs_R: torch.Tensor) -> tuple[list[int], list[float]]:
        assert tokens_R.device.type == logprobs_R.device.type == NAME
        self.waits += 1
        return [1] * len(tokens_R), [-1.0] * len(tokens_R)


def drafted(plan: Plan) -> Plan:
    """The plan with a right and a wrong draft for its last decoding sequence, if that wants so many tokens."""
    if not plan.decode or plan.decode[-1].num_missing < 3:
        return plan
    last = plan.decode[-1]
    drafts = [Draft(last, last.num_computed, [last.token_ids[-1], 1, 2])]
    return dataclasses.replace(plan, decode=plan.decode[:-1], drafts=drafts)


def stepped() -> None:
    """Prompts in chunks beside decoding rows, then decoding alone, both with drafts; sampled and greedy."""
    runner = CountingRunner(model(torch.bfloat16), num_slots=4, context_tokens=32)
    scheduler = Scheduler(num_slots=4, context_tokens=32, chunk_tokens=4, step_tokens=4, max_waiting=4)
    for i in range(3):
        sampling = Sampling(max_tokens=7, stop_token_ids=(), temperature=0.7 * (i > 0), seed=i)
        prompt = np.arange((3, 6, 7)[i], dtype=np.int32)  # chunks of 2 and more: a single number would be sent for real
        request = CompletionRequest(request_id=f"r{i}", session_id=f"r{i}", prompt_ids=prompt, sampling=sampling)
        scheduler.submit(Sequence(request, arrived=0.0))
    steps = mixed = num_drafts = 0
    while plan := scheduler.plan():
        steps, mixed = steps + 1, mixed + bool(plan.chunks and plan.decode)
        plan = drafted(plan)
        runner.step(plan)
        num_drafts += len(plan.drafts)
        assert all(draft.num_accepted == 1 for draft in plan.drafts)
        for sequence in [s for s in scheduler.running if s.finished]:
            scheduler.finish(sequence)
        assert runner.waits <= steps < 20
    assert mixed
    assert num_drafts >= 4
    assert runner.waits >= 4


def refused(call: Callable[[], object], words: str) -> None:
    """What the device would not let pass is not let pass here."""
    with pytest.raises((RuntimeError, AssertionError, DataDependentOutputException)) as error:
        call()
    assert words in f"{error.type.__name__}: {error.value}"


CASES: dict[str, Callable[[], None]] = {
    "a training step": lambda: trained(lambda loss: loss),
    "an optimiser's steps": optimised,
    "an engine's steps": stepped,
    "a tensor of the CPU is refused": lambda: refused(
        lambda: trained(lambda loss: loss + torch.ones(2).sum(0, keepdim=True)), "same device"
    ),
    "waiting is refused": lambda: refused(lambda: trained(lambda loss: loss * loss.item()), "DataDependent"),
}


EXACT: dict[str, Callable[[], None]] = {
    "a program is given no tensor of the CPU": lambda: refused(
        lambda: operators().linear(torch.ones(4, 16).bfloat16(), torch.ones(8, 16)), "is given tensors on ['cpu']"
    ),
}


def main() -> None:
    """Every case by itself."""
    _setup_privateuseone_for_python_backend(NAME)
    if "exact" in sys.argv:
        only_look()
    for name, case in (CASES | (EXACT if "exact" in sys.argv else {})).items():
        said = ""
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                case()
        except Exception as error:  # noqa: BLE001 - told to the test
            where = [f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
            said = f"{type(error).__name__}: {str(error)[:400]}\n{' '.join(where[-12:])}"
        print(json.dumps({"case": name, "error": said}), flush=True)


if __name__ == "__main__":
    main()
