"""Limits of context and turn length: defaults from the starting checkpoint, and checks against the tasks.

A rollout whose first prompt and one turn exceed `harness.context_tokens` ends before the model is called, and a turn
that is shorter than any tool call is useless. Both are checked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import build
from etude.errors import CheckpointError, ConfigError
from etude.harness import Call, ChatFormat, HarnessConfig, standard_tools
from etude.harness.commands import Signature
from etude.loop.config import RunConfig
from etude.models.config import ModelConfig
from etude.models.headers import read_model_config
from etude.records.task import Split, Task
from etude.seams import TaskSource

MOST_CONTEXT = 4096
"""The largest default context in tokens: an engine needs KV memory for `max_sequences` full contexts."""
LEAST_TURN, MOST_TURN = 24, 512
TURNS_IN_CONTEXT = 8
LOOKED_AT = 8  # number of tasks checked per split
_SMALLEST: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


def build_config(given: Mapping[str, Any]) -> RunConfig:
    """Build the config from the user's settings, with limits filled in by `with_limits`. Raises `ConfigError`; for a
    starting checkpoint that cannot be read, also `CheckpointError`."""
    try:
        return build(RunConfig, with_limits(given))
    except ConfigError:
        if isinstance(given.get("start"), str):
            start_model_config(Path(given["start"]))  # without it the limits are not known: that is the error to mend
        raise


def with_limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's settings (nested dicts) with missing limits filled in from the starting checkpoint.

    Contexts are as long as the model has positions, but at most `MOST_CONTEXT` tokens; a turn has an eighth of a
    context. Without a starting checkpoint, or if it cannot be read, the settings are returned unchanged."""
    start, engine, harness = given.get("start"), given.get("engine", {}), given.get("harness", {})
    if not isinstance(start, str) or not isinstance(engine, Mapping) or not isinstance(harness, Mapping):
        return dict(given)
    try:
        positions = start_model_config(Path(start)).context_tokens
    except (ConfigError, CheckpointError):
        return dict(given)
    engine, harness = dict(engine), dict(harness)
    wanted = harness.get("context_tokens", 0)
    least = wanted if type(wanted) is int else 0
    context = engine.setdefault("context_tokens", max(least, min(positions, MOST_CONTEXT)))
    context = harness.setdefault("context_tokens", context)
    if type(context) is int:
        turn = min(max(context // TURNS_IN_CONTEXT, LEAST_TURN), MOST_TURN)
        harness.setdefault("turn_tokens", max(1, min(turn, context - 1)))
    return {**given, "engine": engine, "harness": harness}


def start_model_config(checkpoint: Path) -> ModelConfig:
    """Read the model config from a starting checkpoint's config.json.

    Raises `ConfigError` when the file does not exist or the architecture is not supported, and `CheckpointError` when
    the file is damaged."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError:
        what, facts = f"start = {str(checkpoint)!r} is not a checkpoint", "it has no config.json"
        hint = "give a Hugging Face checkpoint directory"
        if (checkpoint / "run.json").is_file():
            facts += "; it is a run"
            hint = f"write its model with `etude export {checkpoint} DIR`, then set start = DIR"
        raise ConfigError(what, facts, hint=hint) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint="copy or download the checkpoint again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is damaged", "it is not an object", hint="copy or download the checkpoint again")
    try:
        config = ModelConfig.from_hf(raw)
    except CheckpointError as error:  # a valid file of an unsupported architecture
        facts = f"{error.what}{': ' if error.facts else ''}{error.facts}"
        raise ConfigError(f"start = {str(checkpoint)!r} cannot be used", facts, hint=error.hint) from None
    return read_model_config(checkpoint) if config.mtp_heads else config


def check_positions(
    model: ModelConfig, *, context_tokens: int, rope_factor: float = 1.0, given: Collection[str] = ()
) -> None:
    """Check that a checkpoint's model has `context_tokens` positions, of which mid-training makes `rope_factor` times
    as many.

    `given`: the dotted names of the settings that the user set; the error names that one. Raises `ConfigError`."""
    positions = model.extended(rope_factor).context_tokens
    if context_tokens > positions:
        name, lower = "engine.context_tokens", "lower it, and harness.context_tokens with it"
        if "harness.context_tokens" in given and name not in given:  # `with_limits` made the engine's from it
            name, lower = "harness.context_tokens", "lower it"
        raise ConfigError(
            f"{name} = {context_tokens} is too large",
            f"the checkpoint has positions for {positions}",
            hint=f"{lower}, or start from a model with a longer context",
        )


def first_tasks(source: TaskSource, splits: Sequence[Split]) -> list[Task]:
    """Return the first `LOOKED_AT` tasks of each split."""
    sizes = {split: source.size(split) for split in splits}
    return [
        source.task(split, i)
        for split, size in sizes.items()
        for i in range(LOOKED_AT if size is None else min(LOOKED_AT, size))
    ]


def check_limits(
    limits: HarnessConfig, chat: ChatFormat, tasks: Sequence[Task], log: Callable[[str], None] = lambda _: None
) -> None:
    """Check that rollouts of these tasks can take a turn, and that a turn can hold a tool call.

    `log` is called with a line when some tasks or tools do not fit. Raises `ConfigError` when none fits, and
    `ChatError` for a checkpoint whose chat format has no tool calls."""
    signatures: Mapping[str, Signature] = {}  # a program that is a command has its own tools
    if not limits.is_command:
        signatures = standard_tools(limits.tools).signatures
        _check_turns(limits, chat, signatures, log)
    system = [{"role": "system", "content": limits.prompt}] if limits.prompt else []
    first = ([*system, {"role": "user", "content": task.instruction}] for task in tasks)
    prompts = sorted(len(chat.encode_prompt(messages, signatures)) for messages in first)
    past = [tokens for tokens in prompts if tokens + limits.turn_tokens > limits.context_tokens]
    if not past:
        return
    what = f"harness.context_tokens = {limits.context_tokens}"
    wanted = -(-(prompts[-1] + limits.max_turns * limits.turn_tokens) // 64) * 64
    if len(past) == len(prompts):
        raise ConfigError(
            f"{what} is too small for one turn of any of the first {len(prompts)} tasks",
            f"their prompts, with the tools' schemas, have {prompts[0]} to {prompts[-1]} tokens, a turn "
            f"{limits.turn_tokens}: every rollout would end before the model is called",
            hint=f"set harness.context_tokens to {wanted} or more, and engine.context_tokens at least as large",
        )
    log(
        f"{what} is too small for one turn of {len(past)} of the first {len(prompts)} tasks: their prompts have up to "
        f"{prompts[-1]} tokens; their rollouts will end before the model is called"
    )


def _check_turns(
    limits: HarnessConfig, chat: ChatFormat, signatures: Mapping[str, Signature], log: Callable[[str], None]
) -> None:
    calls = {name: len(chat.encode_call(smallest_call(signature))) for name, signature in signatures.items()}
    past = {name: tokens for name, tokens in calls.items() if tokens > limits.turn_tokens}
    what = f"harness.turn_tokens = {limits.turn_tokens}"
    sizes = ", ".join(f"{name} {tokens}" for name, tokens in past.items())
    if len(past) == len(calls) or (limits.require_submit and "submit" in past):
        raise ConfigError(
            f"{what} is too small for a call of {'any tool' if len(past) == len(calls) else 'submit'}",
            f"tokens of the shortest calls in the checkpoint's format: {sizes}",
            hint=f"set harness.turn_tokens to {4 * max(calls.values())} or more: calls have longer arguments",
        )
    if past:
        log(f"{what} is too small for the shortest call of some tools, in tokens: {sizes}")


def smallest_call(signature: Signature) -> Call:
    """Return a call with the shortest possible values for the required parameters only."""
    required = (parameter for parameter in signature.parameters if parameter.required)
    return Call(signature.name, {parameter.name: _SMALLEST.get(parameter.kind, "x") for parameter in required})
