"""Keeps the live weights of a reference engine at the newest published version: a thread that follows the store.

A separate process fetches, decodes and checks every digest (`weights.FollowerProcess`), since decoding in a thread
would hold the GIL and delay the steps. Here the checked update is prepared as a swap of the model's own memory. The
engine pauses only while the swap is written.

After each swap the live memory is compared bit for bit with what was published. If it differs, or if a fetched update
was not written, everything is written again. Errors are reported (`engine.trouble` and an event) and retried: an engine
that cannot update keeps serving its version, and refuses requests that demand a newer one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Protocol

import numpy as np
import torch

from etude.errors import EtudeError, WeightsError
from etude.inference.engine import ReferenceEngine, SwapResult
from etude.inference.ranks import RankedTarget
from etude.records.adapter import adapted_modules
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights import Tensor, Update, content_digest, tensor_digest
from etude.weights.follow.runtime_map import Derived, Map, named
from etude.weights.follow.targets import Swap, Target
from etude.weights.tensors import DTYPES, Codes, DType

RETRY_S = 0.5


class Chain(Protocol):
    """A source of published versions, such as a `weights.Follower` or a `weights.FollowerProcess`."""

    @property
    def version(self) -> Version | None:
        """The version that was fetched last; None before the first."""
        ...

    def advance(self) -> Update | None:
        """Fetch and check the newest version. Returns what changed, or None when there is nothing new."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """All tensors of the version that was fetched last, by the names under which they were published."""
        ...


Live = tuple[Mapping[str, torch.Tensor], Sequence[Derived]]
"""Live memory by published name, and what is derived from it."""
Adapted = Callable[[Mapping[str, Tensor]], Live]
"""Makes the live memory for an adapter from its published tensors. Raises `EtudeError` when it cannot be served."""


class WeightSync:
    """Updates the weights of `engine` to each new version, from `start` or `start_at_head` until `stop`.

    - `views`: the live weights by published name.
    - `chain`: where the versions come from.
    - `derived`: memory that is computed from the live weights, such as decoded low-precision weights.
    - `adapted`: creates the live memory if LoRA adapters are published. None: this engine cannot load adapters.
    - `ranked`: makes the target of all ranks from the first version's tensors, for an engine with several ranks;
      `views`, `derived` and `adapted` are then unused for writing.
    - `poll_s`: the pause between two polls of the chain in seconds; 0 for a chain whose `advance` itself waits for a
      new version.

    On a GPU, preparation and comparison use a separate CUDA stream."""

    def __init__(
        self,
        engine: ReferenceEngine,
        views: Mapping[str, torch.Tensor],
        chain: Chain,
        *,
        derived: Sequence[Derived] = (),
        adapted: Adapted | None = None,
        ranked: Callable[[Mapping[str, Tensor]], RankedTarget] | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.engine, self.chain, self.poll_s = engine, chain, poll_s
        self._live: Live = views, derived
        self._adapted = adapted
        self._ranked = ranked
        self._target_made: Target | RankedTarget | None = None
        devices = {view.device for view in views.values() if view.device.type == "cuda"}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None  # type: ignore[no-untyped-call]
        self._telemetry = telemetry
        self.checked = 0.0  # when the chain was last polled; a fetch that takes long does not count as waiting
        self._written = False  # whether the live weights equal the chain's version
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{engine.name}-follow", daemon=True)

    def start_at_head(self) -> None:
        """Adopt the newest version, so that the first request sees it, then start the thread.

        Errors are reported in `engine.trouble`, not raised."""
        self._try()
        self.start()

    def start(self) -> None:
        """Start the thread. Until a newer version is fetched, the engine serves the version that it has."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Further calls of `stop` do nothing."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def step(self) -> Version | None:
        """Load the newest published version into the engine, if it is not loaded yet.

        Returns the version, or None when there is nothing new. Raises `EtudeError`."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return self._step()

    def _step(self) -> Version | None:
        update = self.chain.advance()
        if self.chain.version is None or (self._written and update is None):
            return None
        written, self._written = self._written, False
        self._refuse_non_finite(update if written else None)
        if written and update is not None:
            swap = self._target.prepare(update, self.chain.tensors)  # it can be undone if writing fails
        else:
            swap = self._prepare_all()
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
    def _target(self) -> Target | RankedTarget:
        """The memory that versions are written to: the adapter's if the first version is one, else the model's."""
        if self._target_made is None:
            tensors = self.chain.tensors
            if self._ranked is not None:
                self._target_made = self._ranked(tensors)
                return self._target_made
            views, derived = self._adapted(tensors) if self._adapted and adapted_modules(tensors) else self._live
            self._target_made = Target(Map(named(views), derived=derived))
        return self._target_made

    def _refuse_non_finite(self, update: Update | None) -> None:
        """Raise `WeightsError` when the weights to write (an update, or all for None) contain NaN or Inf."""
        tensors, version = self.chain.tensors, self.chain.version
        coming = {name: tensor.codes for name, tensor in (tensors if update is None else update.replaced).items()}
        if update is not None:
            coming |= {name: codes for name, (_, codes) in update.changed.items()}
        bad = [name for name, codes in coming.items() if not is_finite(codes, DTYPES[tensors[name].dtype])]
        if bad:
            raise WeightsError(
                f"{bad[0]} of {version} is not finite",
                f"NaN or Inf in {len(bad)} tensors; {self.engine.name} keeps {self.engine.version}",
                hint="the training has diverged: publish a version from before that",
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

    def _prepare_all(self) -> Swap:
        """Prepare all weights of the chain's version. The swap cannot be undone."""
        tensors, version = self.chain.tensors, self.chain.version
        assert version is not None, "the chain gave tensors without a version"
        update = Update(version, changed={}, replaced=tensors, removed=(), fetch_s=0.0, fetched_bytes=0)
        return self._target.prepare(update, tensors, undoable=False)

    def _swap(self, swap: Swap) -> SwapResult | None:
        """Swap once no session pins the old version. Returns None when stopped meanwhile."""
        if self._stream is not None:
            self._stream.synchronize()  # the prepared data must be complete
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
                f"the live weights of {self.engine.name} are not {version}",
                f"{damaged[0]}, one of {len(damaged)}, differs after a complete rewrite",
                hint="restart the engine; if it happens again, the memory is faulty",
            )


def is_finite(codes: Codes, kind: DType) -> bool:
    """Return whether tensor elements contain neither NaN nor Inf. `codes` are the raw bits, and `kind` their format.

    An element is NaN or Inf if all bits of its exponent are 1. f8_e4m3 has no Inf: its NaNs have ones in all bits but
    the sign."""
    if kind.exponent_shift is None or kind.parts > 1:  # integers; 4-bit codes are always finite
        return True
    lowest = 1 if kind.name == "f8_e4m3" else 1 << kind.exponent_shift
    ones = codes.dtype.type((1 << kind.bits - 1) - lowest)
    return not bool(((codes & ones) == ones).any())


def initial_version(tensors: Iterable[tuple[str, torch.Tensor]]) -> Version:
    """Return the version of weights from a checkpoint: step 0, incarnation of zeros, digest of the content as float32.

    `tensors`: all weights with their names."""
    return Version(step=0, incarnation="00000000", digest=content_digest({n: _digest(t) for n, t in tensors}))


def _digest(view: torch.Tensor) -> str:
    codes = view.detach().cpu().float().contiguous().numpy().view(np.uint32).ravel()
    return tensor_digest(Tensor("f32", tuple(view.shape), codes))
