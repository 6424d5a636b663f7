"""The limits of rollouts: taken from the starting checkpoint where the config gives none, and held against the tasks.

A rollout whose first prompt and one turn exceed `harness.context_tokens` ends before the model is asked once, and a
turn that is shorter than any tool call says nothing. Both are known before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import build
from etude.errors import CheckpointError, ConfigError
from etude.harness import Call, ChatFormat, HarnessConfig, standard_tools
from etude.harness.commands import Signature
from etude.loop.config import RunConfig
from etude.models.config import ModelConfig
from etude.records.task import Split, Task
from etude.seams import TaskSource

MOST_CONTEXT = 4096
"""The largest context in tokens where the config names none: an engine has KV memory for `max_sequences` whole
contexts."""
LEAST_TURN, MOST_TURN = 24, 512
TURNS_IN_CONTEXT = 8
LOOKED_AT = 8  # tasks of a split
_SMALLEST: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}


def configured(given: Mapping[str, Any]) -> RunConfig:
    """The config of what its user gave. Raises `ConfigError`."""
    return build(RunConfig, with_limits(given))


def with_limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a user gave and, where it starts from a checkpoint, the limits that it leaves out: contexts of as many
    tokens as the model has positions, at most `MOST_CONTEXT`; turns of an eighth of one. What cannot be read is left
    for the checks of a config to refuse."""
    start, engine, harness = given.get("start"), given.get("engine", {}), given.get("harness", {})
    if not isinstance(start, str) or not isinstance(engine, Mapping) or not isinstance(harness, Mapping):
        return dict(given)
    try:
        positions = starting_model(Path(start)).context_tokens
    except (ConfigError, CheckpointError):
        return dict(given)
    engine, harness = dict(engine), dict(harness)
    asked = harness.get("context_tokens", 0)
    context = engine.setdefault("context_tokens", max(asked if type(asked) is int else 0, min(positions, MOST_CONTEXT)))
    context = harness.setdefault("context_tokens", context)
    if type(context) is int:
        turn = min(max(context // TURNS_IN_CONTEXT, LEAST_TURN), MOST_TURN)
        harness.setdefault("turn_tokens", max(1, min(turn, context - 1)))
    return {**given, "engine": engine, "harness": harness}


def starting_model(checkpoint: Path) -> ModelConfig:
    """The model that the config.json of a starting checkpoint describes. Raises `ConfigError`, `CheckpointError`."""
    path = checkpoint / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError:
        raise ConfigError(
            f"start = {str(checkpoint)!r}", "no config.json there", hint="give a Hugging Face checkpoint directory"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged", str(error), hint="copy or download the checkpoint again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is damaged", "it is no object", hint="copy or download the checkpoint again")
    try:
        return ModelConfig.from_hf(raw)
    except CheckpointError as error:  # it is whole, and of another architecture: no `start`
        facts = f"{error.what}{': ' if error.facts else ''}{error.facts}"
        raise ConfigError(f"start = {str(checkpoint)!r}", facts, hint=error.hint) from None


def first_tasks(source: TaskSource, splits: Sequence[Split]) -> list[Task]:
    """The first tasks of each split."""
    sizes = {split: source.size(split) for split in splits}
    return [
        source.task(split, i)
        for split, size in sizes.items()
        for i in range(LOOKED_AT if size is None else min(LOOKED_AT, size))
    ]


def check_limits(
    limits: HarnessConfig, chat: ChatFormat, tasks: Sequence[Task], said: Callable[[str], None] = lambda _: None
) -> None:
    """Check that rollouts of these tasks can take a turn, and that a turn can hold a tool call. `said` is called with a
    line where some tasks or tools do not fit. Raises `ConfigError` where none fits, and `ChatError` for a checkpoint
    without tool calls."""
    tools = standard_tools(limits.tools)
    _check_turns(limits, chat, tools.signatures, said)
    asked = ([{"role": "user", "content": task.instruction}] for task in tasks)
    prompts = sorted(len(chat.encode_prompt(messages, tools.signatures)) for messages in asked)
    past = [tokens for tokens in prompts if tokens + limits.turn_tokens > limits.context_tokens]
    if not past:
        return
    what = f"harness.context_tokens = {limits.context_tokens}"
    wanted = -(-(prompts[-1] + limits.max_turns * limits.turn_tokens) // 64) * 64
    if len(past) == len(prompts):
        raise ConfigError(
            f"{what} has no room for one turn of any of the first {len(prompts)} tasks",
            f"their prompts, with the tools' schemas, have {prompts[0]} to {prompts[-1]} tokens, a turn "
            f"{limits.turn_tokens}: every rollout would end before the model is asked",
            hint=f"set harness.context_tokens to {wanted} or more, and engine.context_tokens not below it",
        )
    said(
        f"{what} has no room for one turn of {len(past)} of the first {len(prompts)} tasks: their prompts have up to "
        f"{prompts[-1]} tokens; their rollouts will end before the model is asked"
    )


def _check_turns(
    limits: HarnessConfig, chat: ChatFormat, signatures: Mapping[str, Signature], said: Callable[[str], None]
) -> None:
    calls = {name: len(chat.encode_call(_smallest_call(signature))) for name, signature in signatures.items()}
    past = {name: tokens for name, tokens in calls.items() if tokens > limits.turn_tokens}
    what = f"harness.turn_tokens = {limits.turn_tokens}"
    told = ", ".join(f"{name} {tokens}" for name, tokens in past.items())
    if len(past) == len(calls) or (limits.require_submit and "submit" in past):
        raise ConfigError(
            f"{what} has no room for a call of {'any tool' if len(past) == len(calls) else 'submit'}",
            f"the shortest calls in the checkpoint's format, in tokens: {told}",
            hint=f"set harness.turn_tokens to {4 * max(calls.values())} or more: calls have longer arguments",
        )
    if past:
        said(f"{what} has no room for the shortest call of some tools, in tokens: {told}")


def _smallest_call(signature: Signature) -> Call:
    """A call with the arguments that it cannot do without, each as short as can be."""
    required = (parameter for parameter in signature.parameters if parameter.required)
    return Call(signature.name, {parameter.name: _SMALLEST.get(parameter.kind, "x") for parameter in required})
