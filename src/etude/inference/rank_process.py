"""The process of an engine's rank other than 0: it computes that rank's part of each forward pass.

Rank 0 starts it with `python -m etude.inference.rank_process STEPS WEIGHTS`, the file descriptors of its two
connections (`rank_messages`). It has no scheduler, sampler or requests. It ends when rank 0 ends, and after an error in
a forward pass, which rank 0 notices."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence

import numpy as np
import torch

from etude.errors import EtudeError, WeightsError
from etude.inference.device_memory import DeviceMemory
from etude.inference.kv import KVCache, Span
from etude.inference.lifetime import die_with_parent
from etude.inference.rank_messages import (
    Apply,
    Call,
    Compare,
    Link,
    Prepare,
    RankJob,
    Reply,
    Score,
    Step,
    Undo,
    WeightsCall,
    replied,
)
from etude.inference.ranks import load_part, meet, part_target
from etude.inference.step_thread import SWITCH_S
from etude.models import Transformer
from etude.numerics.device import on_device
from etude.weights import Update
from etude.weights.follow.image import Image, read_image
from etude.weights.follow.targets import Swap, Target


def main(argv: Sequence[str]) -> int:
    """Run a rank until rank 0 ends. `argv`: the two file descriptors, STEPS and WEIGHTS.

    Returns the exit code if the model cannot be loaded; otherwise it ends the process and does not return."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles these signals; this process ends with it
        signal.signal(ending, signal.SIG_IGN)
    die_with_parent()
    steps, weights = (Link(socket.socket(fileno=int(fd)), None) for fd in argv)
    job: RankJob = pickle.loads(steps.receive_bytes()[0])
    torch.set_num_threads(job.threads)
    sys.setswitchinterval(SWITCH_S)
    try:
        weights.send(replied())
        part = Part(job)
        weights.send(replied())
    except EtudeError as error:
        with contextlib.suppress(OSError):
            weights.send(replied(error))
        return error.exit_code
    threading.Thread(target=_follow, args=(part.weights, weights), daemon=True).start()
    try:
        while True:
            part.make(steps)
    except (EOFError, ConnectionError):  # rank 0 has ended
        os._exit(0)
    except EtudeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)  # the other thread may be in a write


class Part:
    """A rank's part of a model, of its keys and values, and of new weights."""

    def __init__(self, job: RankJob) -> None:
        self.model = load_part(job, meet(job)).eval()
        self.device = self.model.embedding.device
        sizes, operators = self.model.local, self.model.operators
        room = {"num_slots": job.config.max_sequences, "context_tokens": job.config.context_tokens}
        self.kv: KVCache | DeviceMemory = (
            KVCache(sizes, operators, **room)
            if self.device.type == "cpu"
            else DeviceMemory(sizes, operators, **room, device=self.device)
        )
        self.weights = Weights(self.model)
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=self.device)  # rank 0 computes the logits

    @torch.inference_mode()
    def make(self, steps: Link) -> None:
        """Receive a call, and make it. Raises `EOFError` when rank 0 has ended."""
        call, _ = steps.receive(Call)
        with on_device(self.device):
            if isinstance(call, Step):
                self._step(call)
            elif isinstance(call, Score):
                self.model(torch.tensor(call.token_ids, device=self.device), rows=self._no_rows)
            else:
                steps.send(self.weights.write(call))

    def _step(self, step: Step) -> None:
        for source, target, stop in step.copies:
            self.kv.copy(source, target, stop)
        slots, positions = (np.array(numbers, np.int64) for numbers in (step.slots, step.positions))
        cache = self.kv.step(slots, positions, [Span(*span) for span in step.spans])
        self.model(torch.tensor(step.token_ids, device=self.device), cache, rows=self._no_rows)


class Weights:
    """Prepares, writes and compares new versions of a rank's weights. `model`: this rank's part."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._target: Target | None = None
        self._image: Image | None = None
        self._swap: Swap | None = None
        cuda = model.embedding.is_cuda
        self._stream = torch.cuda.Stream(model.embedding.device) if cuda else None  # type: ignore[no-untyped-call]

    def write(self, call: Apply | Undo) -> Reply:
        """Write the prepared version, or undo that, between two forward passes. Returns the reply."""
        try:
            assert self._swap is not None, "it was prepared"
            if isinstance(call, Apply):
                self._swap.apply()
            elif self._swap.applied:
                self._swap.undo()
            if self._stream is not None:
                torch.cuda.synchronize(self._stream.device)
        except WeightsError as error:
            return replied(error)
        return replied()

    def answer(self, call: WeightsCall, fds: list[int]) -> Reply:
        """Prepare, compare or commit a version, while forward passes go on. Returns the reply."""
        try:
            with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                names = self._made(call, fds)
                if self._stream is not None:
                    self._stream.synchronize()
        except EtudeError as error:
            return replied(error)
        except (OSError, MemoryError) as error:
            hint = "free memory on the engine's machine; the engine tries again"
            return replied(WeightsError("the new weights could not be prepared", str(error), hint=hint))
        return replied(names=names)

    def _made(self, call: WeightsCall, fds: list[int]) -> list[str]:
        if isinstance(call, Prepare):
            if not fds:
                hint = "raise the limit of open files (ulimit -n) of the engine; the engine tries again"
                raise WeightsError(
                    "the shared memory of new weights did not arrive", "too many files are open", hint=hint
                )
            self._prepare(call, fds[0])
        elif isinstance(call, Compare):
            assert self._target is not None, "it was prepared"
            assert self._image is not None, "it was prepared"
            return self._target.differing(self._image.tensors)
        elif self._swap is not None:
            self._swap.commit()
            self._swap = self._image = None
        return []

    def _prepare(self, call: Prepare, fd: int) -> None:
        try:
            self._swap, self._image = None, read_image(fd, call.table_at)
        finally:
            os.close(fd)
        update, tensors = self._image.update, self._image.tensors
        if call.complete:
            update = Update(update.version, changed={}, replaced=tensors, removed=(), fetch_s=0.0, fetched_bytes=0)
        self._target = self._target or part_target(self._model, tensors)
        self._swap = self._target.prepare(update, tensors, undoable=not call.complete)


def _follow(weights: Weights, link: Link) -> None:
    """Answer the calls that come beside the forward passes. An unexpected error ends the process, as rank 0 sees."""
    try:
        while True:
            call, fds = link.receive(WeightsCall)
            link.send(weights.answer(call, fds))
    except (EOFError, ConnectionError):  # rank 0 has ended
        return
    except BaseException:  # noqa: BLE001 - rank 0 must see it
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
