"""Prepares suites (`etude.evals.suites`) for evaluation: the models to compare, the config of each, and the tasks.

A suite is refused if the model was trained on one of its tasks; these are recognised by digest and by problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import build, to_plain
from etude.errors import ConfigError, EtudeError, SuiteRefused
from etude.evals.suites import Suite, read_suite
from etude.experience.database import NoLedger
from etude.harness.config import HarnessConfig
from etude.harness.tools import STANDARD_TOOLS
from etude.loop.checkpoints import newest_checkpoint
from etude.loop.config import RunConfig, open_tasks, read_config
from etude.loop.evaluation import Baseline, Model, RunEngines, tasks_of
from etude.loop.locations import read_ledger
from etude.records.task import Split, Task
from etude.rollouts.model_url import Endpoint
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks.corpus import unused_library

URL_CONTEXT = 1 << 20
"""The context of models at a URL and of scripted agents, in bytes. The server of a model at a URL refuses a
conversation that is too long for it."""
URL_TURN_TOKENS = 4096
GENERAL_CHARS = 16_384
"""Length in characters of the default general text, on which the loss of a checkpoint is measured."""
MOST_COMPARED = 20_000
"""The most training tasks of an endless source that are compared with a suite: the last ones that RL has admitted."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: a checkpoint directory, a model at a URL, a scripted agent, or the weights on a run's
    engines.

    `label`: the model's name in results. `run`: the run that trained it; None: unknown. `prompted`: whether it gets the
    suite's prompt."""

    label: str
    model: Model
    run: RunFolder | None = None
    prompted: bool = False


def subjects_of(model: Path, *, label: str, beside: bool, prompt: str) -> list[Subject]:
    """Return the model to evaluate, and with `beside` also the untrained model: once without and once with `prompt`.

    `model` is a checkpoint directory, or a run, of which the newest checkpoint is used. The untrained model is the
    run's starting checkpoint. `label`: the name in results; "": made from the path. Raises `SuiteRefused` with `beside`
    for a checkpoint that is in no run."""
    run = run_of(model)
    is_run = run is not None and run.path.resolve() == model.resolve()
    checkpoint = newest_checkpoint(run) if run is not None and is_run else model
    place = f"{run.path.resolve().name}@{checkpoint.name}" if run is not None else checkpoint.resolve().name
    found = [Subject(label or place, checkpoint, run)]
    if not beside:
        return found
    if run is None:
        raise SuiteRefused(
            f"the untrained model of {model} is unknown",
            "this checkpoint is in no run folder",
            hint="give a run, or leave out --beside",
        )
    untrained = run / "checkpoints" / "mid"
    found.append(Subject(f"{run.path.resolve().name}@untrained", untrained, run))
    if prompt:
        found.append(Subject(f"{run.path.resolve().name}@untrained, prompted", untrained, run, prompted=True))
    return found


def run_of(model: Path) -> RunFolder | None:
    """Return the run at a path, or the run whose checkpoint is at this path; None if there is none."""
    for place in (model, model.resolve().parent.parent):
        if (place / "run.json").is_file():
            return RunFolder.open(place)
    return None


def config_for(suite: Suite, given: Mapping[str, Any], subject: Subject, *, source: str = "") -> RunConfig:
    """Return the config with which a suite is run on a model.

    `given` are the settings of the run or of a config file. The suite's tasks and limits replace them. `source`: a task
    source to use in place of the suite's; "": none. Raises `ConfigError` for settings that do not fit together, or that
    differ from those of the run whose engines are borrowed."""
    plain = {**given}
    harness = {**plain.get("harness", {}), **suite.harness}
    if suite.tasks:
        plain["tasks"] = {**suite.tasks}
    if source:
        plain["tasks"] = {**plain.get("tasks", {}), "source": source}
    plain["tasks"] = {**plain.get("tasks", {}), "canaries": 0.0}
    plain["seed"] = suite.seed
    plain["rewards"] = to_plain(suite.rewards)
    plain["experience"] = {**plain.get("experience", {}), "min_group_size": 0}  # evaluations run whole groups
    is_url, in_bytes = isinstance(subject.model, Endpoint), isinstance(subject.model, Endpoint | Baseline)
    if (is_url or subject.prompted) and suite.prompt:
        harness["prompt"] = suite.prompt
    if in_bytes:
        harness |= {"context_tokens": URL_CONTEXT, "turn_tokens": URL_TURN_TOKENS, "summary_tokens": 0}
        for section in ("engine", "model"):
            plain[section] = {**plain.get(section, {}), "context_tokens": URL_CONTEXT}
        plain.pop("start", None)
    if isinstance(subject.model, Baseline):  # scripts write files and run commands, whatever a model may do
        tools = [*harness.get("tools", HarnessConfig.tools)]
        harness["tools"] = tools + [name for name in STANDARD_TOOLS if name not in tools]
    plain["harness"] = harness
    config = build(RunConfig, plain)
    if isinstance(subject.model, RunEngines):
        _check_borrowed(config, read_config(subject.model.run))
    return config


def _check_borrowed(config: RunConfig, run: RunConfig) -> None:
    """Check that a config describes the engines of the run from which they are borrowed. Raises `ConfigError`."""
    here, there = ([[*map(str, one.fleet.engines)], one.engine.context_tokens] for one in (config, run))
    if here != there:
        facts = "fleet.engines and engine.context_tokens are {} and {}, the run's {} and {}".format(*here, *there)
        what = "the config does not describe the engines of the run"
        raise ConfigError(what, facts, hint="leave out --config, to use the run's own settings")


def suite_tasks(suite: Suite, config: RunConfig) -> list[Task]:
    """Return the tasks of a suite. Raises `SuiteRefused` if there are none, `TaskError` if the source is damaged."""
    tasks = tasks_of(open_tasks(config, canaries=False), suite.splits, suite.num_tasks)
    if not tasks:
        splits = " and ".join(suite.splits)
        raise SuiteRefused(
            f"suite {suite.name} has no task",
            f"{config.tasks.source} has none in {splits}",
            hint="set other splits in the suite, or give another task source",
        )
    return tasks


def refuse_trained(suite: Suite, tasks: Sequence[Task], run: RunFolder, log: Callable[[str], None] = print) -> int:
    """Check that neither a run nor the runs before it have trained on tasks of a suite.

    The run before is the one from whose checkpoint a run started (`start`), and so on. The check compares digests and
    problems of the suite's tasks with those of each run's training tasks. These are all training tasks of a source with
    a fixed number of tasks; of an endless source, the last `MOST_COMPARED` that RL has admitted. Every task in the
    training split of a run's own source counts as trained on, since mid-training may use it. `log` gets a note about an
    earlier run that cannot be read and so is not compared.

    Returns the number of training tasks that were not compared. Raises `SuiteRefused` with the number of tasks that a
    run was trained on, and one of them."""
    num_left, passed, start = _refuse_trained(suite, tasks, run), {run.path.resolve()}, read_config(run).start
    try:
        while start is not None and (before := run_of(start)) is not None and before.path.resolve() not in passed:
            passed.add(before.path.resolve())
            num_left += _refuse_trained(suite, tasks, before)
            start = read_config(before).start
    except SuiteRefused:
        raise
    except EtudeError as error:
        log(f"the tasks of the run of {start}, from which training went on, are not compared with the suite's: {error}")
    return num_left


def _refuse_trained(suite: Suite, tasks: Sequence[Task], run: RunFolder) -> int:
    config = read_config(run)
    own = open_tasks(config, canaries=False)
    size = own.size(Split.TRAIN)
    count = size if size is not None else _admitted(run)
    num_left = 0 if size is not None else max(0, count - MOST_COMPARED)
    trained, problems = set[str](), set[str]()
    for index in range(num_left, count):
        task = own.task(Split.TRAIN, index)
        trained.add(task.task_id)
        problems |= {task.problem} - {""}
    found = [
        task for task in tasks if task.task_id in trained or task.problem in problems or _in_training_split(task, own)
    ]
    if found:
        first = found[0]
        raise SuiteRefused(
            f"suite {suite.name} has {len(found)} of {len(tasks)} tasks that {run.path.name} was trained on",
            f"one of them is {first.split} task {first.index} ({first.task_id})",
            hint="evaluate on splits that are never trained on: heldout, validation or transfer",
        )
    return num_left


def check_suite(name: str, run: RunFolder) -> None:
    """Check that a suite can be read, that it has tasks, and that a run has not trained on one of them.

    Raises `InputError` for an unknown suite, and `ConfigError`, `TaskError` or `SuiteRefused` for one that cannot be
    played."""
    suite = read_suite(name)
    config = config_for(suite, settings_of(run), Subject(run.path.name, run.path, run))
    refuse_trained(suite, suite_tasks(suite, config), run)


def _in_training_split(task: Task, own: TaskSource) -> bool:
    if task.split is not Split.TRAIN or task.source != own.name:
        return False
    with contextlib.suppress(EtudeError):
        return own.task(Split.TRAIN, task.index).task_id == task.task_id
    return False


def _admitted(run: RunFolder) -> int:
    """How many training tasks RL has admitted; 0 if it has not begun."""
    try:
        with contextlib.closing(read_ledger(run)) as ledger:
            return ledger.cursor(Split.TRAIN)
    except NoLedger:
        return 0


def general_text(suite: Suite) -> str:
    """Return the general text of a suite, on which the loss of a checkpoint is measured.

    It is the suite's `general_text`, or pieces of Python's standard library that etude's mid-training never uses.
    Raises `ConfigError` for a file that cannot be read."""
    path = suite.general_text
    if path is None:
        return unused_library(GENERAL_CHARS)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        hint = "give a text file in UTF-8, relative to the suite's file"
        raise ConfigError(f"general_text = {str(path)!r} cannot be read", str(error), hint=hint) from None


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the settings in a run's config.toml as nested dicts. Raises `RunError` if it cannot be read."""
    plain: dict[str, Any] = to_plain(read_config(run))
    return plain
