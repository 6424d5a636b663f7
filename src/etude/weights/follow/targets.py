"""Writes an update into live memory: prepared before the pause, written in it, then committed or undone.

Writes are absolute and per storage: a storage that two names share is written once, repeating a write does no harm, and
undoing writes the old codes back. `prepare` does everything that takes time or can fail. `Swap.apply` scatters,
recomputes derived memory, and calls the probe. It needs no second copy of the model and no reload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from etude.errors import EtudeError, WeightsError, nearest
from etude.records.completion import Version
from etude.weights.delta.arena import Arena
from etude.weights.follow.follower import Update
from etude.weights.follow.live import Call, Places, Scatter, batch_calls
from etude.weights.follow.runtime_map import Derived, Map, Piece
from etude.weights.tensors import Codes, Spec, Tensor

Probe = Callable[[], bool]
"""A check of the new weights, run in the pause: returns False to undo the update."""
Known = Mapping[str, Tensor | Spec]
"""The version's tensors by name, or only their specs."""
_PlannedWrite = tuple[str, tuple[Places, Codes] | None, Piece]
"""A write that was prepared: tensor name, changes (None: the complete tensor), and piece."""

DENSE = 16
"""If one change falls on at most this many bytes, copying the complete piece takes less of the pause than scattering
(measured)."""


class Target:
    """The live weights of an engine, to which updates are written.

    `where`: the map of checkpoint tensors to the engine's memory. Nothing else may write the weights between `prepare`
    and the end of a swap.

    >>> live = {"w": np.array([1, 2, 3], np.uint16)}
    >>> from etude.weights.follow.runtime_map import named
    >>> target = Target(Map(named(live)))
    >>> target.differing({"w": Tensor("u16", (3,), np.array([1, 2, 4], np.uint16))})
    ['w']
    """

    def __init__(self, where: Map) -> None:
        self._map = where

    def prepare(self, update: Update, tensors: Known, *, undoable: bool = True) -> Swap:
        """Prepare an update: compute all writes, check them, and copy them to their device. Nothing is written yet.

        `tensors`: all tensors of the version by name (`Follower.tensors`); or their specs, if there is no copy of them
        (`LiveFollower.specs`): then changes are scattered, however many they are. `undoable` False: do not keep the old
        codes, so that the update cannot be undone; for the first version. Raises `WeightsError` for a published tensor
        that the engine has no place for, a tensor that it needs and that is not published, or tied tensors with
        different bits.
        """
        self._check_complete(update.version, tensors)
        known, swap = {**tensors, **update.replaced}, Swap(update.version)
        kept = Arena() if undoable else None
        written: dict[object, _PlannedWrite] = {}
        for name in sorted({*update.changed, *update.replaced}):
            self._check_ties(name, update, known)
            for piece in self._places_of(name, known):
                change = None if name in update.replaced else piece.take(_spec(known[name]), *update.changed[name])
                key = piece.window.key
                if key in written:
                    _check_equal(written[key], (name, change, piece), known)
                    continue
                written[key] = name, change, piece
                if change is None or len(change[0]):
                    swap.writes.append(_write(piece, change, known[name], kept))
        touched = {*update.changed, *update.replaced}
        touched |= {tie for name in touched for tie in self._map.tied.get(name, ())}
        for one in self._map.derived:
            if one.sources & touched:
                swap.derived.append(_Hook(one, [window.read() for window in one.outputs] if undoable else []))
        swap.undoable = undoable
        swap.put = batch_calls([write.put for write in swap.writes])
        swap.put_back = batch_calls([write.put_back for write in swap.writes])
        return swap

    def differing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Compare live memory with tensors, bit for bit. Return the names of those that differ.

        For verifying an update, or detecting a flipped bit.
        """
        return [
            name
            for name, tensor in sorted(tensors.items())
            for piece in self._places_of(name, tensors)
            if not piece.holds(tensor.spec, tensor.codes)
        ]

    def _check_complete(self, version: Version, tensors: Known) -> None:
        for name in self._map.pieces.keys() - tensors.keys():
            if not any(tie in tensors for tie in self._map.tied.get(name, ())):
                raise WeightsError(
                    f"{version} has no {name!r}",
                    f"the engine needs it; {len(tensors)} tensors are published",
                    hint="publish a version of the engine's architecture; do not map tensors that it computes",
                )

    def _places_of(self, name: str, tensors: Known) -> tuple[Piece, ...]:
        pieces = self._map.pieces.get(name, ())
        if not pieces and name not in self._map.ignored:
            raise WeightsError(
                f"the engine has no place for {name!r}",
                f"it has places for {len(self._map.pieces)} tensors",
                hint=f"map it, or add it to `ignored` of the `Map`; {nearest(name, self._map.pieces)}",
            )
        for piece in pieces:
            piece.check(name, _spec(tensors[name]))
        return pieces

    def _check_ties(self, name: str, update: Update, tensors: Known) -> None:
        for tie in self._map.tied.get(name, ()):
            if tie in tensors and tie not in update.changed and tie not in update.replaced:
                raise _untied(name, tie, "one of them changed")


@dataclass
class Swap:
    """An update that is ready to be written. `Target.prepare` returns one.

    Call `apply` in the engine's pause; then `commit`, or `undo`, also in a pause. `put` does all `writes` in one call,
    and `put_back` undoes them. `derived`: the memory to compute afterwards.
    """

    version: Version
    writes: list[_Write] = field(default_factory=list)
    derived: list[_Hook] = field(default_factory=list)
    undoable: bool = True
    applied: bool = False
    put: Call = lambda: None
    put_back: Call = lambda: None

    @property
    def list_bytes(self) -> int:
        """Memory used by the indices and codes to be written, in bytes.

        Tensors that are written in full belong to the follower and are not counted.
        """
        return sum(write.num_bytes for write in self.writes)

    @property
    def undo_bytes(self) -> int:
        """Memory used to undo the update, in bytes: old codes (elements), and saved outputs of derived memory."""
        kept = [write.old for write in self.writes if write.old is not None]
        return sum(codes.nbytes for codes in (*kept, *(codes for hook in self.derived for codes in hook.old)))

    def apply(self, probe: Probe | None = None) -> None:
        """Write the update, recompute derived memory, and call `probe`, which returns False to refuse the new weights.

        If computing or the probe fails, the update is undone and `WeightsError` is raised. If the update was prepared
        with `undoable` False, the memory then stays as written and must not be used.
        """
        self.applied = True
        try:
            self.put()
            for hook in self.derived:
                hook.derived.compute()
            sound = probe is None or probe()
        except Exception as error:
            why = error.what if isinstance(error, EtudeError) else repr(error)
            raise self._refused(why) from error
        if not sound:
            raise self._refused("the probe returned False")

    def undo(self) -> None:
        """Write back the old weights. Raises `WeightsError` if nothing was applied or they were not kept."""
        if not self.applied or not self.undoable:
            why = "it is committed, or was prepared with undoable=False" if self.applied else "it was not applied"
            raise WeightsError(
                f"{self.version} cannot be undone", why, hint="prepare and apply the version that you want"
            )
        self.put_back()
        for hook in self.derived:
            hook.put_back()
        self.applied = False

    def commit(self) -> None:
        """Free the memory that was kept for `undo`. The update cannot be undone afterwards."""
        self.writes.clear()
        self.derived.clear()
        self.put = self.put_back = _nothing
        self.undoable = False

    def _refused(self, why: str) -> WeightsError:
        """Undo the update if possible, and create an error that states what is in the memory now."""
        hint = "the live weights are incomplete: adopt a version before serving requests"
        with suppress(Exception):  # a hook may fail with the old weights, too
            self.undo()
            hint = "the old weights were restored; fix the cause, then adopt again"
        return WeightsError(f"{self.version} was not adopted", why, hint=hint)


@dataclass(frozen=True, slots=True)
class _Write:
    put: Call
    put_back: Call
    num_bytes: int
    old: Codes | None


@dataclass(frozen=True)
class _Hook:
    derived: Derived
    old: list[Codes]  # the old codes of its outputs

    def put_back(self) -> None:
        if self.derived.outputs:
            for window, codes in zip(self.derived.outputs, self.old, strict=True):
                window.fill(codes.reshape(window.shape))
        else:
            self.derived.compute()


def _write(piece: Piece, change: tuple[Places, Codes] | None, known: Tensor | Spec, kept: Arena | None) -> _Write:
    """Prepare the write of a piece, in full if scattering would take longer. `kept`: allocates what an undo needs."""
    window = piece.window
    fill = partial(piece.fill, known.spec, known.codes) if isinstance(known, Tensor) else None
    if change is None:
        assert fill is not None, "a replaced tensor has data"
        old = window.read() if kept is not None else None
        return _Write(fill, _nothing if old is None else partial(window.fill, old.reshape(window.shape)), 0, old)
    places, codes = change
    old = window.read(places, kept) if kept is not None else None
    whole = fill is not None and len(places) * DENSE > window.num_bytes
    put = fill if fill is not None and whole else window.writer(places, codes)
    back = _nothing
    if old is not None:
        back = replace(put, codes=old) if isinstance(put, Scatter) else window.writer(places, old)
    held = next((call for call in (put, back) if isinstance(call, Scatter)), None)
    return _Write(put, back, held.num_bytes if held else 8 * len(places) + codes.nbytes, old)


def _spec(known: Tensor | Spec) -> Spec:
    return known.spec if isinstance(known, Tensor) else known


def _nothing() -> None:
    """Do nothing: the undo of an update whose old codes were not kept."""


def _check_equal(first: _PlannedWrite, second: _PlannedWrite, tensors: Known) -> None:
    """Raise `WeightsError` if two names would write different codes to one storage."""
    (name, change, _), (other, again, _) = first, second
    if change is not None and again is not None:
        same = all(map(np.array_equal, change, again))
    else:
        known = [(one, tensors[key]) for key, _, one in (first, second)]
        parts = [one.part(tensor.spec, tensor.codes) for one, tensor in known if isinstance(tensor, Tensor)]
        if len(parts) < 2:
            raise _untied(name, other, "one is replaced, and there is no copy of the other to compare it with")
        same = np.array_equal(parts[0], parts[1])
    if not same:
        raise _untied(name, other, "their bits differ")


def _untied(name: str, other: str, why: str) -> WeightsError:
    return WeightsError(
        f"{name!r} and {other!r} are one storage in the engine",
        f"but two different tensors are published: {why}",
        hint="build the engine with tie_word_embeddings off: the checkpoint does not tie them",
    )
