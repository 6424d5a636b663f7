"""Every setting of a config reaches the process that is to use it: watched in a whole run, process by process."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.loop.spread import SPREAD

import etude
from etude.config import load
from etude.loop.config import RunConfig

SETTINGS = """seed = 3

[model]
vocab_size = 320
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 2
head_dim = 16
expert_size = 32
num_experts = 4
top_k = 3
context_tokens = 448

[tasks]
seed = 2
files = 2
functions_per_file = 2
canaries = 0.1

[corpus]
num_demonstrations = 40
right_body = 0.7
num_code_documents = 20
library_chars = 3000

[mid_training]
num_tokens = 4_000
batch_tokens = 512
document_tokens = 256
lr = 2e-3
warmup_steps = 2
weight_decay = 0.02
grad_clip = 2.0
balance = 0.02
balance_bias = 2e-3
eval_every = 3
checkpoint_every = 4

[machines]
memory_bytes = 200_000_000
address_bytes = 900_000_000
processes = 60
cpus = 0.9
work_bytes = 60_000_000
tmp_bytes = 30_000_000
inodes = 8000
open_files = 200

[harness]
tools = ["ls", "cat", "edit", "submit"]
max_turns = 3
turn_tokens = 20
context_tokens = 380
output_chars = 300
turn_deadline_s = 50.0
tool_deadline_s = 4.0
rollout_deadline_s = 25.0
export_bytes = 1_000_000
require_submit = false

[numerics]
mode = "native"
degree = 2

[engine]
max_sequences = 16
context_tokens = 400
chunk_tokens = 128
step_tokens = 256
max_waiting = 100
pin_lease_s = 2.0
stall_s = 50.0
dtype = "bfloat16"
device = "cpu"
speculation = "look-up"

[fleet]
engines = ["reference"]
hung_s = 25.0

[experience]
groups_per_step = 2
group_size = 3
max_lag = 1
straggler = "mask"
credit = "grpo"
curriculum = "source"
kl = 0.01
max_attempts = 2
quarantine = false
review_share = 0.5

[learner]
lr = 1e-3
warmup_steps = 1
grad_clip = 2.0
clip_low = 0.7
clip_high = 1.3
budget_tokens = 4096
replay_routes = true
replay_max_lag = 2
replay_plausible = 0.4
balance = 0.01
balance_bias = 1e-3
kl = 0.01
correction = "truncated"
correction_low = 0.1
correction_high = 3.0
dtype = "bfloat16"
device = "cpu"
recompute = true

[[rewards.terms]]
name = "spread"
weight = 0.1
kind = "spread:Spread"

[rl]
steps = 2
temperature = 0.9
checkpoint_every = 1

[retention]
disk_gb = 50.0

[evals]
heldout_tasks = 3
heldout_tries = 2
during_tasks = 2
every = 1
baseline_tasks = 2
temperature = 0.8
"""
WATCH = """
import dataclasses, json, os, sys

made, seen = dataclasses.dataclass, set()
CHECKS = {"__post_init__", "_check_dpo", "_check_pairs", "_check_ranks"}
CHECKS |= {"_check_engine_numerics", "_check_engine_dtype"}
DEFAULTS = {"_parser", "add_arguments"}  # of arguments that may be given


def process():
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words else "helper"


def watched(cls):
    get = cls.__getattribute__

    def read(self, name):
        value = get(self, name)
        if name in type(self).__dataclass_fields__:
            code = sys._getframe(1).f_code
            files = ("dataclasses.py", "etude/config.py", "<string>")
            if code.co_name not in CHECKS | DEFAULTS and not code.co_filename.endswith(files):
                line = json.dumps([process(), type(self).__name__, name, str(value)])
                if line not in seen:
                    seen.add(line)
                    with open(os.path.join(os.environ["SETTINGS_SEEN"], str(os.getpid())), "a") as out:
                        out.write(line + "\\n")
        return value

    cls.__getattribute__ = read
    return cls


def dataclass(cls=None, /, **options):
    def wrap(cls):
        config = cls.__module__.startswith("etude.") and cls.__name__.endswith(("Config", "MachineLimits"))
        return watched(made(cls, **options)) if config else made(cls, **options)

    return wrap if cls is None else wrap(cls)


dataclasses.dataclass = dataclass
"""
"""Every read of a field of a config's dataclass, noted by the process that reads it."""

Seen = dict[tuple[str, str], dict[str, set[str]]]
"""(class of the section, field) → process → the values that it read."""
DIGEST = "digest='[0-9a-f]+'"
"""The digest of a plug-in's code: the run adds it to the settings."""
NAMES = {"MachineLimits": "MachinesConfig"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "all.toml"
    path.write_text(SETTINGS)
    (path.parent / "spread.py").write_text(SPREAD)
    return path


@pytest.fixture(scope="module")
def seen(config: Path, tmp_path_factory: pytest.TempPathFactory, cli_in: Callable[[Path], Any]) -> Seen:
    """What the processes of a run read."""
    hook, out = tmp_path_factory.mktemp("hook"), tmp_path_factory.mktemp("seen")
    (hook / "sitecustomize.py").write_text(WATCH)
    cli = cli_in(config.parent)
    env = {**cli.env, "PYTHONPATH": str(hook), "SETTINGS_SEEN": str(out)}
    done = dataclasses.replace(cli, env=env)("run", config, "--name", "all", timeout_s=1500)
    assert (config.parent / "runs" / "all" / "summary.json").exists(), done.stdout + done.stderr
    found: Seen = defaultdict(lambda: defaultdict(set))
    for file in out.iterdir():
        for process, section, field, value in map(json.loads, file.read_text().splitlines()):
            found[NAMES.get(section, section), field][process].add(re.sub(DIGEST, "digest=''", value))
    return found


CONDITIONAL = {
    "vllm.environment": "loop/run_processes.py",
    "vllm.kv_tokens": "inference/config.py",
    "vllm.arguments": "loop/run_processes.py",
    "sglang.environment": "loop/run_processes.py",
    "sglang.kv_tokens": "inference/config.py",
    "sglang.arguments": "loop/run_processes.py",
    "experience.review_share": "loop/rollout_scheduler.py",  # of what is solved without a sign of cheating
    "learner.ratio_cap": "training/config.py",  # of cispo
    "learner.dpo_beta": "training/learner.py",  # of dpo
    "learner.dpo_reference": "training/learner.py",
    "learner.expert_parallel": "training/sharded/mesh.py",  # of several ranks
    "learner.lora_alpha": "training/trainable.py",
    "learner.lora_on": "training/trainable.py",
    "parity.patience": "loop/parity.py",  # of an engine that is over its budget
}
"""Settings that this run has no use for, and the file that reads each where a run has."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_setting_has_a_process_that_reads_the_value_that_the_run_was_given(seen: Seen, config: Path) -> None:
    run, unread, other = load(config, RunConfig), [], []
    sections = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    for name, section in sections.items():
        fields = dataclasses.fields(section) if dataclasses.is_dataclass(section) else []
        for field in fields:
            value, read = str(getattr(section, field.name)), seen[type(section).__name__, field.name]
            if not read and f"{name}.{field.name}" not in CONDITIONAL:
                unread.append(f"{name}.{field.name}")
            other += [f"{process} {name}.{field.name} = {had}" for process, had in read.items() if value not in had]
    assert not unread, "nobody reads these: they do nothing"
    assert not other, "these processes work with other values than the run was given"
    assert {"seed", "start"} <= {field for section, field in seen if section == "RunConfig"}


def test_settings_that_a_small_run_does_not_use_are_read_in_the_file_named_for_them() -> None:
    run, source = RunConfig(), Path(etude.__file__).parent
    for name, file in CONDITIONAL.items():
        section, _, field = name.partition(".")
        assert hasattr(getattr(run, section), field)
        assert f".{field}" in (source / file).read_text(), name
