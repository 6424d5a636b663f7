"""Evaluates a checkpoint by itself: starts engines, workers and graders for it, without a learner."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path

from etude.config import to_toml
from etude.errors import CheckpointError
from etude.evals import EvalResult
from etude.file_checksums import SUMS, files_in, verify_files, write_sums
from etude.harness import ChatFormat
from etude.inference.config import EngineKind
from etude.loop.apart import apart
from etude.loop.config import RunConfig, open_tasks
from etude.loop.crew import crew
from etude.loop.evaluating import Each, evaluate
from etude.loop.processes import Supervisor
from etude.models.config import ModelConfig
from etude.models.headers import left_out
from etude.records import Version
from etude.records.task import Split
from etude.run import RunFolder
from etude.scratch import OwnFolder
from etude.telemetry import Telemetry

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def take_checkpoint(checkpoint: Path, run: RunFolder, telemetry: Telemetry | None = None) -> None:
    """Copy a Hugging Face directory into a run as its starting checkpoint and its tokeniser. The optimiser state that
    another run's learner left there is not copied: this run begins at step 0. Layers that etude does not compute are
    named in an event."""
    learners, mid = shutil.ignore_patterns("learner.*", SUMS), run / "checkpoints" / "mid"
    for folder in (mid, run / "tokenizer"):
        (folder / SUMS).unlink(missing_ok=True)
    verify_files(checkpoint, [n for n in files_in(checkpoint) if not n.startswith("learner.")], kind=CheckpointError)
    shutil.copytree(checkpoint, mid, dirs_exist_ok=True, ignore=learners)
    write_sums(mid)
    (run / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, run / "tokenizer" / name)
    write_sums(run / "tokenizer")
    ChatFormat.load(run / "tokenizer")  # raises when there is no usable chat format
    layers = left_out(checkpoint, ModelConfig.from_hf(json.loads((checkpoint / "config.json").read_bytes())))
    if layers and telemetry is not None:
        telemetry.event("start.left_out", checkpoint=str(checkpoint), layers=layers)


def version_of(checkpoint: Path) -> Version | None:
    """The version that a learner saved as this checkpoint; None for a checkpoint that no learner wrote, which counts as
    step 0. Raises `CheckpointError`."""
    path = checkpoint / "learner.json"
    if not path.is_file():
        return None
    verify_files(checkpoint, [path.name], kind=CheckpointError)
    try:
        step, incarnation, digest = json.loads(path.read_bytes())["version"]
        return Version(int(step), str(incarnation), str(digest))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "evaluate another checkpoint of the run"
        raise CheckpointError(f"{path} is damaged", f"it names no version ({error!r})", hint=hint) from None


def alone(config: RunConfig) -> RunConfig:
    """The config without engines from elsewhere, which follow a run's weights and not a checkpoint."""
    engines = config.fleet.engines or (EngineKind.REFERENCE,)
    return dataclasses.replace(config, fleet=dataclasses.replace(config.fleet, engines=engines, listen=""))


async def evaluate_checkpoint(
    checkpoint: Path, config: RunConfig, *, split: Split, num_tasks: int, tries: int, out: Path | None, each: Each
) -> EvalResult:
    """Evaluate a checkpoint with the rollout code of a run; returns what `evaluate` returns, under the step of the
    checkpoint's version. `out`: folder for the rollouts. `each` is called after every rollout."""
    version, config = version_of(checkpoint), alone(config)
    with OwnFolder("eval") as scratch:
        run = RunFolder.create(scratch / "run", config_toml=to_toml(config), seed=config.seed)
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        await apart(functools.partial(take_checkpoint, checkpoint, run, telemetry))
        async with crew(run, config, telemetry, Supervisor(telemetry, hung_s=config.fleet.hung_s)) as members:
            await members.start_sampling()
            result = await evaluate(
                members,
                open_tasks(config, canaries=False),
                name=checkpoint.name,
                split=split,
                step=0,  # the engines' own step: they start with these weights
                num_tasks=num_tasks,
                tries=tries,
                seed=config.seed,
                temperature=config.evals.temperature,
                out=out or run / "evals",
                telemetry=telemetry,
                each=each,
            )
    return dataclasses.replace(result, step=version.step if version else 0)
