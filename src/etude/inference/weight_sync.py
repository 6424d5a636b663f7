"""Keeps an engine's live weights at the head of the weight chain: a thread that asks for news.

Fetching, decoding and checking every digest are the chain's, in a process of its own (`weights.FollowerProcess`): a
thread that decodes holds the interpreter, and the steps wait for it. Here what is proven becomes a `weights.targets`
swap of the model's own memory, and the engine pauses only to write it.
After each swap the live memory is compared with what was published, bit for bit; if it differs, or if an update was
fetched but never written, everything is written anew. Trouble is told (`engine.trouble`, an event) and tried again:
an engine that cannot follow keeps serving what it holds, and refuses what demands more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol

import numpy as np
import torch

from etude.errors import EtudeError, WeightsError
from etude.inference.engine import ReferenceEngine, SwapResult
from etude.records.adapter import adapted_modules
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights import Tensor, Update, content_digest, tensor_digest
from etude.weights.follow.runtime_map import Derived, Map, named
from etude.weights.follow.targets import Swap, Target
from etude.weights.tensors import DTYPES, Codes, DType

RETRY_S = 0.5


class Chain(Protocol):
    """The part of `weights.Follower` and `weights.FollowerProcess` that is used here."""

    @property
    def version(self) -> Version | None: ...

    def advance(self) -> Update | None: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


Live = tuple[Mapping[str, torch.Tensor], Sequence[Derived]]
"""Live memory under its published names, and what is computed of it."""
Adapted = Callable[[Mapping[str, Tensor]], Live]
"""Live memory for an adapter, by its published tensors. Raises `EtudeError` for one that cannot be served."""


class WeightSync:
    """Follows from `start_at_head` to `stop`. `views` are the live weights under their published names;
    `derived` says what is computed of them, such as what packed ones decode to. `adapted`: what is live instead, where
    adapters are published.

    `poll_s`: the rest between two questions to the chain; 0 for one that waits for news itself. On a device what is
    prepared and compared runs on a stream of its own, beside the steps.
    """

    def __init__(
        self,
        engine: ReferenceEngine,
        views: Mapping[str, torch.Tensor],
        chain: Chain,
        *,
        derived: Sequence[Derived] = (),
        adapted: Adapted | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.engine, self.chain, self.poll_s = engine, chain, poll_s
        self._live: Live = views, derived
        self._adapted = adapted
        self._target_made: Target | None = None
        devices = {view.device for view in views.values() if view.device.type == "cuda"}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None  # type: ignore[no-untyped-call]
        self._telemetry = telemetry
        self.checked = 0.0  # when the chain was last done with; a fetch that lasts is no wait
        self._written = False  # whether the live weights are what the chain last gave
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{engine.name}-follow", daemon=True)

    def start_at_head(self) -> None:
        """Adopt what is there, so that the first request finds it, then follow. Trouble is told, not raised."""
        self._try()
        self.start()

    def start(self) -> None:
        """Follow from now on."""
        self._thread.start()

    def stop(self) -> None:
        """End at the next opportunity. Idempotent."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def step(self) -> Version | None:
        """Adopt what is new; the version adopted, or None. Raises `EtudeError` when it cannot."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return self._step()

    def _step(self) -> Version | None:
        update = self.chain.advance()
        if self.chain.version is None or (self._written and update is None):
            return None
        written, self._written = self._written, False
        self._refuse_non_finite(update if written else None)
        swap = self._prepare_update(update) if written and update is not None else self._prepare_all()
        swapped = self._swap(swap)
        if swapped is None:
            return None
        self._repair_if_damaged(swap.version)
        swap.commit()
        self._written = True
        if self._telemetry is not None:
            self._telemetry.event(
                "engine.adopt",
                step=swap.version.step,
                version=str(swap.version),
                fetch_s=round(update.fetch_s, 6) if update is not None else 0.0,
                pause_s=round(swapped.pause_s, 6),
                num_running=swapped.num_running,
            )
        return swap.version

    @property
    def _target(self) -> Target:
        """What the chain's versions are written to; which of two it is, its first version says."""
        if self._target_made is None:
            tensors = self.chain.tensors
            views, derived = self._adapted(tensors) if self._adapted and adapted_modules(tensors) else self._live
            self._target_made = Target(Map(named(views), derived=derived))
        return self._target_made

    def _refuse_non_finite(self, update: Update | None) -> None:
        """Raises `WeightsError` where what is to be written, an update or everything, holds NaN or an infinity."""
        tensors, version = self.chain.tensors, self.chain.version
        coming = {name: tensor.codes for name, tensor in (tensors if update is None else update.replaced).items()}
        if update is not None:
            coming |= {name: codes for name, (_, codes) in update.changed.items()}
        bad = [name for name, codes in coming.items() if not is_finite(codes, DTYPES[tensors[name].dtype])]
        if bad:
            raise WeightsError(
                f"{bad[0]} of {version} is not finite",
                f"NaN or an infinity in {len(bad)} tensors; {self.engine.name} goes on with {self.engine.version}",
                hint="the training that published it has diverged: publish a version from before that",
            )

    def _run(self) -> None:
        while not self._stop.wait(self.poll_s):
            if not self._try():
                self._stop.wait(RETRY_S)

    def _try(self) -> bool:
        try:
            self.step()
        except EtudeError as error:
            if not self._stop.is_set():
                self._report_error(error)
            return False
        finally:
            self.checked = time.monotonic()
        self.engine.trouble = ""
        return True

    def _report_error(self, error: EtudeError) -> None:
        reason = str(error).replace("\n", "; ")
        if reason != self.engine.trouble and self._telemetry is not None:
            self._telemetry.event("engine.trouble", reason=reason)
        self.engine.trouble = reason

    def _prepare_update(self, update: Update) -> Swap:
        """What an update changed; it can be undone where writing it fails."""
        return self._target.prepare(update, self.chain.tensors)

    def _prepare_all(self) -> Swap:
        """All of the chain's version; what was there is not worth keeping."""
        tensors, version = self.chain.tensors, self.chain.version
        assert version is not None, "the chain gave tensors without a version"
        update = Update(version, changed={}, replaced=tensors, removed=(), fetch_s=0.0, fetched_bytes=0)
        return self._target.prepare(update, tensors, undoable=False)

    def _swap(self, swap: Swap) -> SwapResult | None:
        """Wait as long as sessions pin the old version; None when told to stop meanwhile."""
        if self._stream is not None:
            self._stream.synchronize()  # what is to be written is there
        future = self.engine.swap(swap)
        while not self._stop.is_set():
            try:
                return future.result(timeout=0.2)
            except NotYet:
                continue
        future.cancel()
        return None

    def _repair_if_damaged(self, version: Version) -> None:
        damaged = self._target.differing(self.chain.tensors)
        if not damaged:
            return
        self._swap(self._prepare_all())
        if self._target.differing(self.chain.tensors):
            raise WeightsError(
                f"the live weights of {self.engine.name} do not hold {version}",
                f"{damaged[0]}, one of {len(damaged)}, differs after writing it whole",
                hint="restart the engine; if it stays, the memory is bad",
            )


def is_finite(codes: Codes, kind: DType) -> bool:
    """Whether no code has an exponent of ones; in f8_e4m3, which has no infinity, nothing but ones."""
    if kind.exponent_shift is None or kind.parts > 1:  # whole numbers; 4 bits are always a number
        return True
    lowest = 1 if kind.name == "f8_e4m3" else 1 << kind.exponent_shift
    ones = codes.dtype.type((1 << kind.bits - 1) - lowest)
    return not bool(((codes & ones) == ones).any())


def initial_version(views: Mapping[str, torch.Tensor]) -> Version:
    """The name of weights from a checkpoint, not a chain: step 0, no incarnation, digest of the f32 content."""
    return Version(step=0, incarnation="00000000", digest=content_digest({n: _digest(v) for n, v in views.items()}))


def _digest(view: torch.Tensor) -> str:
    codes = view.detach().cpu().float().contiguous().numpy().view(np.uint32).ravel()
    return tensor_digest(Tensor("f32", tuple(view.shape), codes))
