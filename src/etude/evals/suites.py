"""Suites of evaluations as TOML files (docs/formats/suites.md): what is measured, on which tasks, and what must hold.

A suite is named by its file, or by the name of a built-in one (`BUILT_IN`)."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from etude import config
from etude.config import ranged
from etude.errors import InputError, nearest
from etude.evals.result import EvalResult
from etude.records.task import Split, Task
from etude.rewards.config import RewardsConfig

_FOLDER = Path(str(resources.files("etude.evals"))) / "built_in"
BUILT_IN = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of the built-in suites."""


class Purpose(enum.StrEnum):
    """What the result of a suite is used for."""

    CORRECTNESS = "correctness"
    INSTRUCTION_FOLLOWING = "instruction following"
    TOOL_USE = "tool use"
    BREVITY = "brevity"
    INTERRUPTION = "interruption"
    LONG_HORIZON = "long horizon"


METRICS = (
    *("rate", "low", "high", "best_of_k", "turns_mean", "sampled_mean", "prompt_mean", "cached_share", "cheats"),
    *("latency_p50_s", "latency_p99_s", "machine_s", "dollars", "dollars_per_solved"),
    *("dollars_per_solved_task", "judge_dollars"),
    *("num_invalid", "general_bits_per_byte", "general_rise"),
)
"""The numbers that a gate may name: fields of `EvalResult`, the number of invalid rollouts, the loss on the general
text in bits per byte, and this loss minus that of the untrained model (`general_rise`). The mean of a reward term of
the suite has the name "rewards.NAME"."""
TERMS = "rewards."
"""Prefix of the names of reward terms, as metrics of gates."""


@dataclass(frozen=True)
class Gate:
    """A bound on one metric of an evaluation, which fails if the metric is out of bounds.

    `metric` is one of `METRICS`, or "rewards.NAME". `at_least`, `at_most`: the bounds, both included; None: none.
    Raises `ValueError` for an unknown metric, or if both bounds are None."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.metric not in METRICS and not self.metric.startswith(TERMS):
            raise ValueError(f"metric = {self.metric!r} is unknown: {nearest(self.metric, METRICS)}")
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"the gate of {self.metric} has neither at_least nor at_most: set one of them")

    def failure(self, value: float | None) -> str:
        """Return the reason why this value of the metric does not pass the gate; "" if it passes. An unknown value does
        not pass.

        >>> Gate("rate", at_least=0.5).failure(0.4), Gate("rate", at_least=0.5).failure(0.5)
        ('rate = 0.4, must be at least 0.5', '')
        """
        if value is None:
            return f"{self.metric} is unknown"
        if self.at_least is not None and value < self.at_least:
            return f"{self.metric} = {value:.4g}, must be at least {self.at_least:g}"
        if self.at_most is not None and value > self.at_most:
            return f"{self.metric} = {value:.4g}, must be at most {self.at_most:g}"
        return ""


@dataclass(frozen=True)
class Suite:
    """An evaluation suite: the tasks, the number of attempts at each, the settings of the agent, and gates for the
    result.

    - `tasks`: settings as in the section `[tasks]` of a run's config. Empty: the tasks of the config that is evaluated.
    - `splits`: the splits from which the first tasks are taken, `num_tasks` altogether. It is an error if the model was
      trained on one of them.
    - `samples`: rollouts per task; pass@k is given up to this k.
    - `seed`, `temperature`: seed and temperature of the sampling.
    - `prompt`: the system message for models at a URL, and for the prompted baseline (the untrained model with this
      message). "": none.
    - `rewards`: reward terms that are measured, as in the section `[rewards]` of a run's config. Their means are in the
      result; the solve rate does not depend on them, nor they on their weights. Paths in them are relative to the
      working folder.
    - `harness`: settings that replace those of the config's `[harness]`.
    - `general_text`: a text file on which the loss of each checkpoint is measured; its path is relative to the suite's
      file. None: parts of Python's standard library that etude's mid-training never uses."""

    name: str
    purpose: Purpose
    tasks: Mapping[str, Any] = field(default_factory=dict)
    splits: tuple[Split, ...] = (Split.HELDOUT,)
    num_tasks: int = ranged(128, low=1)
    samples: int = ranged(1, low=1, high=1024)
    seed: int = ranged(0, low=0)
    temperature: float = ranged(1.0, low=0.0, high=4.0)
    prompt: str = ""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    harness: Mapping[str, Any] = field(default_factory=dict)
    general_text: Path | None = None
    gates: tuple[Gate, ...] = ()

    def __post_init__(self) -> None:
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits = {list(map(str, self.splits))}: name at least one split, and none twice")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name = {self.name!r} cannot be the name of a folder, in which results are stored")
        if self.rewards.audits:
            raise ValueError("rewards.audits watch a run while it trains: leave them out of a suite")
        terms = {f"{TERMS}{term.name}" for term in self.rewards.terms}
        for gate in self.gates:
            if gate.metric not in METRICS and gate.metric not in terms:
                raise ValueError(f"metric = {gate.metric!r} is no term of the suite: {nearest(gate.metric, terms)}")

    def digest(self, tasks: Sequence[Task]) -> str:
        """Return 16 hex digits that identify what is measured: the settings, and the content of the tasks.

        The result depends neither on gates nor on the path of the general text."""
        plain = config.to_plain(self)
        for key in ("gates", "general_text", "name", *(() if self.rewards.terms else ("rewards",))):
            plain.pop(key, None)
        content = json.dumps([plain, [task.task_id for task in tasks]], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite: a TOML file, or the name of a built-in one. `overrides` are settings such as "num_tasks=8".

    Raises `InputError` if there is no such file or built-in suite, and `ConfigError` for an invalid file.

    >>> read_suite("repair", ["samples=4"]).samples
    4
    """
    path = Path(name)
    if not path.is_file():
        if name not in BUILT_IN:
            hint = f"{nearest(name, BUILT_IN)}; or give a .toml file"
            if path.is_dir():
                hint = f"to play the tasks of a checkpoint's own run: etude eval own --checkpoint {name}"
            raise InputError(f"no suite {name!r}", "neither a file nor a built-in suite", hint=hint)
        path = _FOLDER / f"{name}.toml"
    found = config.build(Suite, config.read(path, overrides, noun="suite", example="docs/formats/suites.md"))
    if found.general_text is None or found.general_text.is_absolute():
        return found
    return config.build(Suite, {**config.read(path, overrides), "general_text": str(path.parent / found.general_text)})


def values_of(
    result: EvalResult, *, general_bits_per_byte: float | None = None, untrained_bits_per_byte: float | None = None
) -> dict[str, float | None]:
    """Return the numbers of a result that a gate may name (`METRICS`); None for those that are unknown. A reward term
    is unknown if its value for one rollout is.

    `general_bits_per_byte`, `untrained_bits_per_byte`: the loss of the model and of the untrained model on the general
    text; None: unknown."""
    found: dict[str, float | None] = {name: getattr(result, name, None) for name in METRICS}
    found |= {f"{TERMS}{name}": None if one.num_unknown else one.value for name, one in result.terms.items()}
    found["num_invalid"] = float(sum(result.invalid.values()))
    found["general_bits_per_byte"] = general_bits_per_byte
    if general_bits_per_byte is not None and untrained_bits_per_byte is not None:
        found["general_rise"] = general_bits_per_byte - untrained_bits_per_byte
    return found
