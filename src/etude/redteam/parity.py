"""The parity probe: can a program distinguish two kinds of machine, and by which facts?

Machines of both kinds are made in random order, one at a time, and a program lists facts about each (`programs.look`).
A classifier is trained and evaluated with k-fold cross-validation: AdaBoost over decision stumps, which is weak enough
for twenty machines of each kind and shows which facts it used. The AUC is 0.5 if the kinds cannot be distinguished, and
1.0 if they always can. It is significant if it is outside of the interval of AUCs with permuted labels. Its confidence
interval is Wilson's, with the number of machines of one kind as sample size, which is conservative.

A fact that is different in each machine (such as a boot id) cannot be learned. A number that only grows with time does
not count either, since both kinds are made in random order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from etude.errors import MachineError
from etude.redteam.stage import programs
from etude.seams import Runtime

Facts = Mapping[str, float | str]
_LOOK_S = 300.0
_ROUNDS, _FOLDS = 8, 5


class Giveaway(msgspec.Struct, frozen=True):
    """A fact that by itself distinguishes two kinds of machine, with an AUC from 0.5 to 1.

    `of_a` and `of_b` are its most frequent value, or median, in machines of each kind."""

    fact: str
    auc: float
    of_a: str  # its most frequent value, or median, in machines of kind a
    of_b: str


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """How well a program can distinguish the kinds of machine `a` and `b`; made by `compare`.

    `auc` is that of a classifier on machines it was not trained on, and `interval` its 95 % confidence interval.
    `chance` is the 95 % interval of AUCs with permuted labels. `num_machines` counts each kind."""

    a: str
    b: str
    num_machines: int  # of each kind
    auc: float  # of the classifier, on machines that it was not trained on
    interval: tuple[float, float]  # 95 % confidence interval of the AUC
    chance: tuple[float, float]  # 95 % interval of AUCs with permuted labels
    giveaways: tuple[Giveaway, ...]

    @property
    def is_distinguishable(self) -> bool:
        """Whether the AUC is significantly higher than with permuted labels, so that the machines can be told apart."""
        return self.auc > self.chance[1]


async def probe_parity(
    a: Runtime, b: Runtime, *, num_machines: int = 20, names: tuple[str, str] = ("", ""), seed: int = 0
) -> Parity:
    """Make `num_machines` of each runtime in random order, and measure how well their facts distinguish them.

    `names` are those of the two kinds in the result; "" stands for the runtime's name. Raises `MachineError`."""
    seen = await observe((a, b), num_machines=num_machines, seed=seed)
    return compare(seen[0], seen[1], names=(names[0] or a.info.name, names[1] or b.info.name), seed=seed)


async def observe(runtimes: Sequence[Runtime], *, num_machines: int, seed: int = 0) -> list[list[Facts]]:
    """Make `num_machines` of each runtime, in random order, and run a program in each that lists facts about it.

    Returns one list for each runtime, with the facts of each machine. Raises `MachineError`."""
    seen: list[list[Facts]] = [[] for _ in runtimes]
    for kind in np.random.default_rng(seed).permutation([*range(len(runtimes))] * num_machines):
        seen[kind].append(await _look(runtimes[kind]))
    return seen


def compare(a: Sequence[Facts], b: Sequence[Facts], *, names: tuple[str, str], seed: int = 0) -> Parity:
    """Measure how well a classifier distinguishes two kinds of machine, given the facts of several machines of each."""
    seen, labels = [*a, *b], np.array([0] * len(a) + [1] * len(b))
    table = Table.of(seen)
    auc, chance = cross_validated_auc(table.values, labels, seed=seed)
    low, high = wilson(auc, min(len(a), len(b)))
    return Parity(
        a=names[0],
        b=names[1],
        num_machines=min(len(a), len(b)),
        auc=round(auc, 4),
        interval=(round(low, 4), round(high, 4)),
        chance=(round(chance[0], 4), round(chance[1], 4)),
        giveaways=tuple(_giveaways(seen, table, labels)),
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's confidence interval of a proportion `share` of `count` samples (95 % for z = 1.96).

    >>> tuple(round(end, 2) for end in wilson(1.0, 20))
    (0.84, 1.0)
    """
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return float(max(0.0, middle - half)), float(min(1.0, middle + half))


async def _look(runtime: Runtime) -> Facts:
    [machine] = await runtime.fork(await runtime.prepare(programs()), 1)
    try:
        command = ["python3", "-m", "programs", "look", "look", json.dumps({})]
        result = await machine.exec(command, key="look", deadline_s=_LOOK_S, output_bytes=1 << 20)
    finally:
        await machine.close()
    for line in result.output.splitlines():
        if line.startswith(b"SEEN "):
            seen: Facts = json.loads(line[5:])
            return seen
    end = f"at its deadline of {_LOOK_S:g} s" if result.timed_out else f"with exit code {result.exit_code}"
    facts = f"{runtime.info.name}: its program ended {end}: {result.output[-300:].decode(errors='replace')}"
    raise MachineError("the probe failed in a machine", facts, hint="it needs python3, 3.10 or later")


@dataclass(frozen=True)
class Table:
    """The facts of N machines as a numeric table: `columns` are the F names, `values` has the shape [N, F].

    A fact that is text becomes one column for each of its values that two machines share, named "fact=value"."""

    columns: tuple[str, ...]  # [F] "uptime", "file.vendor=QEMU"
    values: npt.NDArray[np.float64]  # [N, F]

    @classmethod
    def of(cls, seen: Sequence[Facts]) -> Table:
        """Build the table from the facts of each machine; a missing fact counts as the text "absent".

        >>> Table.of([{"os": "a", "n": 1}, {"os": "a", "n": 2}, {"os": "b", "n": 3}]).columns
        ('n', 'os=a', 'os=absent')
        """
        columns: dict[str, npt.NDArray[np.float64]] = {}
        for name in sorted({name for one in seen for name in one}):
            values = [one.get(name, "absent") for one in seen]
            if all(isinstance(value, int | float) for value in values):
                columns[name] = np.array(values, np.float64)
                continue
            texts = [str(value) for value in values]
            for value in sorted({*texts, "absent"}):
                if texts.count(value) > 1 or value == "absent":
                    columns[f"{name}={value}"] = np.array([text == value for text in texts], np.float64)
        return cls(tuple(columns), np.stack(list(columns.values()), axis=1))


def cross_validated_auc(
    values: npt.NDArray[Any], labels: npt.NDArray[Any], *, seed: int = 0, num_permutations: int = 100
) -> tuple[float, tuple[float, float]]:
    """Return the cross-validated AUC of a classifier, and the 95 % interval of AUCs with permuted labels.

    `values` has the shape [N, F] and `labels` [N], each 0 or 1. The labels are permuted `num_permutations` times."""
    rng = np.random.default_rng(seed)
    permuted = [_cross_validated(values, rng.permutation(labels), rng) for _ in range(num_permutations)]
    low, high = np.quantile(permuted, [0.025, 0.975])
    return _cross_validated(values, np.asarray(labels), rng), (float(low), float(high))


def _cross_validated(values: npt.NDArray[Any], labels: npt.NDArray[Any], rng: np.random.Generator) -> float:
    folds = np.empty(len(labels), np.int64)
    for kind in (0, 1):  # as many of each kind in each fold
        of_kind = np.flatnonzero(labels == kind)
        folds[rng.permutation(of_kind)] = np.arange(len(of_kind)) % _FOLDS
    scores = np.zeros(len(labels))
    for fold in range(_FOLDS):
        is_test = folds == fold
        scores[is_test] = _boosted(values[~is_test], labels[~is_test], values[is_test])
    return auc_of(scores, labels)


def _boosted(
    values: npt.NDArray[Any], labels: npt.NDArray[Any], test_values: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    signs = np.where(labels == 1, 1.0, -1.0)
    weights = np.full(len(labels), 1.0 / len(labels))
    scores = np.zeros(len(test_values))
    order = np.argsort(values, axis=0, kind="stable")
    for _ in range(_ROUNDS):
        feature, cut, sign, error = _stump(values, order, signs, weights)
        error = min(max(error, 1e-6), 0.5)
        weight = 0.5 * np.log((1 - error) / error)
        weights *= np.exp(-weight * signs * np.where(values[:, feature] > cut, sign, -sign))
        weights /= weights.sum()
        scores += weight * np.where(test_values[:, feature] > cut, sign, -sign)
    return scores


def _stump(
    values: npt.NDArray[Any], order: npt.NDArray[Any], signs: npt.NDArray[Any], weights: npt.NDArray[Any]
) -> tuple[int, float, float, float]:
    """Return feature, threshold, sign above the threshold, and weighted error of the best decision stump."""
    ordered = np.take_along_axis(values, order, axis=0)
    carried = (weights * signs)[order]  # [N, F]
    below = np.cumsum(carried, axis=0)[:-1]
    above_less_below = carried.sum(axis=0) - 2 * below
    cuttable = ordered[1:] > ordered[:-1]
    strength = np.where(cuttable, np.abs(above_less_below), -1.0)
    row, feature = np.unravel_index(int(strength.argmax()), strength.shape)
    if strength[row, feature] < 0:
        return 0, np.inf, 1.0, 0.5
    cut = float((ordered[row, feature] + ordered[row + 1, feature]) / 2)
    margin = float(above_less_below[row, feature])
    return int(feature), cut, 1.0 if margin > 0 else -1.0, (1.0 - abs(margin)) / 2


def auc_of(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Return the AUC: the probability that a sample with label 1 has a higher score than one with label 0.

    Ties count half. `scores` and `labels` (0 or 1) have the shape [N].

    >>> auc_of(np.array([0.1, 0.9, 0.8]), np.array([0, 1, 1])), auc_of(np.array([1.0, 1.0]), np.array([0, 1]))
    (1.0, 0.5)
    """
    ones, zeros = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float(((ones > zeros) + 0.5 * (ones == zeros)).mean())


def _giveaways(seen: Sequence[Facts], table: Table, labels: npt.NDArray[Any], limit: int = 20) -> list[Giveaway]:
    best: dict[str, float] = {}
    for column, values in zip(table.columns, table.values.T, strict=True):
        fact, auc = column.partition("=")[0], auc_of(values, labels)
        best[fact] = max(best.get(fact, 0.5), auc, 1 - auc)
    ranked = sorted(best, key=lambda fact: -best[fact])[:limit]
    return [
        Giveaway(fact, round(best[fact], 3), *(_typical([s.get(fact, "absent") for s, at in zip(seen, labels,
        strict=True) if at == k]) for k in (0, 1)))
        for fact in ranked
        if best[fact] >= 0.75
    ]  # fmt: skip


def _typical(values: Sequence[float | str]) -> str:
    if all(isinstance(value, int | float) for value in values):
        return f"{float(np.median(np.array(values, np.float64))):g}"
    texts = [str(value) for value in values]
    return " ".join(max(set(texts), key=texts.count).split())[:80]
