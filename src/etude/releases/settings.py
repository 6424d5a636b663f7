"""The settings of a release: a TOML file with its gate, its shares, and the metrics that decide.

`docs/formats/releases.md` describes the file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import config
from etude.config import ranged
from etude.errors import InputError
from etude.evals.suites import BUILT_IN


@dataclass(frozen=True)
class Metric:
    """A metric of users' feedback, with values in [0, 1], such as whether an edit was kept.

    - `higher_is_better`: False for an outcome such as a dissatisfied reply.
    - `margin`: how much worse the canary may be. It is rolled back when its confidence interval shows that it is worse
      by more, and promoted only when the interval shows that it is not. The first metric of a release, which decides
      the promotion, has no margin.
    - `cost_rise`: by how much the dollars per unit of the first metric (per kept change) may be higher than those of
      the stable version, as a fraction (0.1: 10 per cent). A canary that costs more is not promoted. None: costs are
      not compared."""

    name: str
    higher_is_better: bool = True
    margin: float = ranged(0.05, low=0.0, high=1.0)
    cost_rise: float | None = ranged(None, low=0.0)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a metric has an empty name")
        if self.cost_rise is not None and not self.higher_is_better:
            raise ValueError(f"cost_rise of {self.name!r}: only a metric of which more is better has a cost per unit")


@dataclass(frozen=True)
class SuiteGate:
    """What the candidate must keep on one suite, compared with the stable version on the same tasks.

    - `suite`: the suite's file, relative to the file of these settings, or the name of a built-in suite.
      `read_settings` makes its path absolute.
    - `margin`: by how much the solve rate may be lower. The whole confidence interval must be above -`margin`.
    - `cost_rise`: by how much the dollars per task may be higher, as a fraction (0.1: 10 per cent); None: costs are not
      compared."""

    suite: str
    margin: float = ranged(0.02, low=0.0, high=1.0)
    cost_rise: float | None = ranged(None, low=0.0)

    @property
    def name(self) -> str:
        """Its name in messages: that of the file, or of the built-in suite."""
        return Path(self.suite).name


@dataclass(frozen=True)
class ReleaseSettings:
    """The settings of a release.

    - `gate`: the suites that the candidate must pass; at least one. `parity`: whether a passed `etude parity` of the
      candidate is required.
    - `metrics`: the canary is promoted if it is better in the first one. The others can only prevent a promotion, or
      cause a rollback.
    - `shares`: the percentages of subjects that get the canary, one after another. At 100 no subject has the stable
      version, so nothing is compared.
    - `alpha`: the probability that a canary equal to the stable version is promoted or rolled back, over all shares,
      metrics and looks.
    - `subjects`, `share_s`: the share grows only after this many subjects of the canary were compared, and after this
      many seconds.
    - `window_s`, `cap`: a subject's value is the mean of its outcomes in the first `window_s` seconds after its first
      one at a share, at most `cap` of them. It is compared when these seconds have passed.
    - `silent_s`: the release is held (its share stays as it is) when one of the versions has had no outcome for this
      many seconds.
    - `max_s`: the release is held when the canary has been at one share for this many seconds without a decision."""

    gate: tuple[SuiteGate, ...]
    metrics: tuple[Metric, ...]
    parity: bool = False
    shares: tuple[int, ...] = (1, 5, 25, 100)
    alpha: float = ranged(0.05, low=1e-6, high=0.5)
    subjects: int = ranged(100, low=1)
    share_s: float = ranged(3600.0, low=0.0)
    window_s: float = ranged(86_400.0, low=0.0)
    cap: int = ranged(10, low=1, high=10_000)
    silent_s: float = ranged(172_800.0, low=1.0)
    max_s: float = ranged(1_209_600.0, low=1.0)

    def __post_init__(self) -> None:
        names = [metric.name for metric in self.metrics]
        suites = [one.suite for one in self.gate]
        if not self.gate or len({*suites}) < len(suites):
            raise ValueError(f"gate = {suites}: a release needs a gate of at least one suite, and none twice")
        if not names or len({*names}) < len(names):
            raise ValueError(f"metrics = {names}: name at least one metric, and none twice")
        if any(metric.margin == 0.0 for metric in self.metrics[1:]):
            raise ValueError("margin = 0 of a metric after the first: promotion would need that all are better")
        if any(metric.cost_rise is not None for metric in self.metrics[1:]):
            raise ValueError("cost_rise of a metric after the first: costs are compared per unit of the first metric")
        rising = all(a < b for a, b in zip(self.shares, self.shares[1:], strict=False))
        if not self.shares or not rising or self.shares[0] < 1 or self.shares[-1] > 100 or self.shares[0] == 100:
            raise ValueError(f"shares = {list(self.shares)}: give rising percents from 1 to 100, the first below 100")

    @property
    def compared_shares(self) -> tuple[int, ...]:
        """The shares below 100: those at which some subjects get the stable version."""
        return tuple(share for share in self.shares if share < 100)


def read_settings(path: Path, overrides: Sequence[str] = ()) -> ReleaseSettings:
    """Read the settings of a release. `overrides` are settings such as "alpha=0.01".

    Raises `ConfigError` for a file that cannot be read, and for unknown, missing and invalid settings, and `InputError`
    for a suite that does not exist."""
    raw = config.read(path, overrides, noun="file of release settings", example="docs/guides/releases.md")
    found = config.build(ReleaseSettings, raw)
    gate = tuple(dataclasses.replace(one, suite=_suite_at(one.suite, path)) for one in found.gate)
    return dataclasses.replace(found, gate=gate)


def _suite_at(suite: str, settings: Path) -> str:
    """Return the absolute path of a suite's file, or the name of a built-in suite."""
    beside, here = (settings.parent / suite).absolute(), Path(suite).absolute()
    if beside.is_file():
        return str(beside)
    if suite in BUILT_IN:
        return suite
    facts = f"{beside} does not exist, and no built-in suite has this name ({', '.join(BUILT_IN)})"
    hint = f"correct the name in {settings}; a path is relative to that file"
    if here.is_file():
        facts += f"; {here} exists, but a path is relative to the file of settings"
        hint = f"write suite = {os.path.relpath(here, settings.parent.absolute())!r} in {settings}"
    raise InputError(f"no suite {suite!r}", facts, hint=hint)
