"""TRL's GRPOTrainer on etude's tasks: the peer in `benchmarks.learning.trl`, run in its own virtual environment.

The trainer is used as its documentation says: an `environment_factory` whose methods are the tools. Tasks, tools,
machines and grading are etude's own code, so both sides do and pay the same work around the model. What TRL leaves to
its user is filled in so as to cost it nothing: the tokeniser parses etude's calls (its `parse_response`), a call that
cannot be read is answered with the same error, and a submit ends the rollout, which TRL has no signal for: the parser
reports it as plain text, so that no turn is generated after it. Prints nothing; writes ``progress.json`` and
``step-NNNNNN/`` checkpoints. Imports torch and TRL, nothing of etude that does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learning.rewards import Rewards
from etude.config import load
from etude.environments import MachineGrader, NamespaceRuntime, prepare, take_exports
from etude.harness import Call, ChatFormat, standard_tools
from etude.harness.tools import Workbench
from etude.loop.config import RunConfig, open_tasks
from etude.loop.usage import Processes
from etude.records import Graded
from etude.records.task import Split

T = TypeVar("T")
SUBMITTED = "<submitted>"
CALL_S = 60.0
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<|call|>' + call['function']['name'] }}"
    "{% for name, value in call['function']['arguments'].items() %}{{ ' ' + name + ' ' + value }}{% endfor %}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""etude's chat format, but for the names of arguments, without which TRL refuses a template. No model sees them: TRL
renders the prompt and tools' answers only, and appends sampled tokens as they are."""


class World:
    """etude's side: tasks, machines, tools and grader, on an event loop in a thread of its own."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.source = config, open_tasks(config)
        self.tools = standard_tools(config.harness.tools)
        self.runtime = NamespaceRuntime(config.machines)
        self.grader = MachineGrader(self.runtime)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def all(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*works)


class Repair:
    """One rollout's environment. Its public methods are the tools that TRL offers; `reset` begins a task."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bench: Workbench | None = None

    def reset(self, index: int, **_: Any) -> None:
        self._task = self._world.source.task(Split.TRAIN, index)
        self._world.wait(self._begin())

    async def _begin(self) -> None:
        if self._bench is not None:
            await self._bench.machine.close()
        limits = self._world.config.harness
        snapshot = await prepare(self._world.runtime, self._task)
        (machine,) = await self._world.runtime.fork(snapshot, 1)
        self._bench = Workbench.of(
            self._task, machine, key="trl", deadline_s=limits.tool_deadline_s, output_chars=limits.output_chars
        )

    def _call(self, name: str, **arguments: str) -> str:
        return self._world.wait(self._world.tools.run(Call(name, arguments), self._bench))

    async def _reward(self) -> float:
        harness = self._world.config.harness
        exports = await take_exports(
            self._bench.machine, self._task, self._world.runtime, max_bytes=harness.export_bytes
        )
        outcome = await self._world.grader.grade(self._task, self._world.source.answer(self._task), exports)
        return outcome.grade if isinstance(outcome, Graded) else 0.0

    def ls(self) -> str:
        """List the repository's files."""
        return self._call("ls")

    def cat(self, path: str) -> str:
        """Show a file with line numbers.

        Args:
            path: a file of the repository
        """
        return self._call("cat", path=path)

    def test(self) -> str:
        """Run the repository's tests."""
        return self._call("test")

    def edit(self, path: str, line: str, text: str) -> str:
        """Replace one line, keeping its indentation.

        Args:
            path: a file of the repository
            line: its number, or a function's name for its body
            text: the new line
        """
        return self._call("edit", path=path, line=line, text=text)

    def unreadable(self, error: str) -> str:
        """Answers a call that could not be read.

        Args:
            error: what was wrong
        """
        return error


def reward(completions: list[Any], environments: list[Repair], **_: Any) -> list[float]:
    """Hidden tests, for rollouts that submitted; the others score 0, as in etude."""
    submitted = [completion[-1].get("content") == SUBMITTED for completion in completions]
    world = environments[0]._world
    works = [e._reward() for e, done in zip(environments, submitted, strict=True) if done]
    graded = iter(world.wait(world.all(works)))
    return [next(graded) if done else 0.0 for done in submitted]


class ChatTokenizer(PreTrainedTokenizerFast):
    """etude's tokeniser as transformers wants it, reading calls as etude's harness does."""

    chat: ChatFormat
    tools: Any

    def parse_response(self, response: Any, **_: Any) -> dict[str, Any]:
        reply = self.chat.parse(response, self.tools.signatures)
        if any(call.name == "submit" for call in reply.calls):
            return {"role": "assistant", "content": SUBMITTED}
        call = reply.calls[0] if reply.calls else Call("unreadable", {"error": reply.error or "call a tool"})
        function = {"name": call.name, "arguments": call.arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def tokenizer(start: Path, world: World) -> ChatTokenizer:
    made = ChatTokenizer(
        tokenizer_file=str(start / "tokenizer.json"),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
        padding_side="left",
    )
    made.response_template = {}  # not None: `parse_response` may be called
    made.chat, made.tools = ChatFormat.load(start), world.tools
    return made


class Progress(TrainerCallback):
    """Leaves a checkpoint and the CPU seconds so far every few steps; ends at one where the training rewards are high
    enough, or when the CPU seconds are spent."""

    def __init__(self, out: Path, start: Path, *, every: int, budget_s: float, rewards: Rewards, enough: float) -> None:
        self.out, self.start, self.every, self.budget_s = out, start, every, budget_s
        self.rewards, self.enough = rewards, enough
        self.rows: list[dict[str, float]] = []
        self.spared_s = 0.0  # CPU of checkpoints, which is not training's

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began_s, self.own_s, self.wall = Processes().cpu_s(os.getpid()), time.process_time(), time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.rows and logs and "reward" in logs:
            self.rows[-1]["reward"] = float(logs["reward"])
            self.rewards.add(float(logs["reward"]))
        (self.out / "progress.json").write_text(json.dumps(self.rows))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        spent = Processes().cpu_s(os.getpid()) - self.began_s - self.spared_s
        own = time.process_time() - self.own_s - self.spared_s
        wall_s = time.monotonic() - self.wall
        self.rows.append({"step": state.global_step, "trainer": own, "machines": spent - own, "wall_s": wall_s})
        if state.global_step % self.every == 0:
            began = time.process_time()
            folder = self.out / f"step-{state.global_step:06d}"
            model.save_pretrained(folder)
            for name in ("tokenizer.json", "chat_template.jinja"):
                shutil.copy(self.start / name, folder / name)
            self.spared_s += time.process_time() - began
            if self.rewards.reached(self.enough):
                control.should_training_stop = True
        if spent > self.budget_s:
            control.should_training_stop = True


def settings(
    out: Path, config: RunConfig, *, steps: int, lr: float, rows: int, updates: int, passes: int
) -> GRPOConfig:
    """etude's recipe in TRL's words. Its defaults would be lr 1e-6, bf16, gradient checkpointing, scaled rewards.
    `updates` of the optimiser with each generation, `passes` over it; `rows` of one forward."""
    experience, learner, harness = config.experience, config.learner, config.harness
    batch = experience.groups_per_step * experience.group_size
    return GRPOConfig(
        output_dir=str(out / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // updates // rows,
        num_generations=experience.group_size,
        steps_per_generation=batch // rows,
        num_iterations=passes,
        max_completion_length=harness.context_tokens - 16,
        generation_kwargs={"max_new_tokens": harness.turn_tokens},
        max_tool_calling_iterations=harness.max_turns - 1,
        shuffle_dataset=False,
        temperature=config.rl.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=learner.grad_clip,
        beta=0.0,
        epsilon=1 - learner.clip_low,
        epsilon_high=learner.clip_high - 1,
        loss_type="dapo",  # summed over tokens, divided by the batch's number of them: etude's normaliser
        scale_rewards="none",
        router_aux_loss_coef=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=1e9, help="CPU seconds")
    parser.add_argument("--enough", type=float, default=1e9, help="mean training reward at which it ends")
    parser.add_argument("--window", type=int, default=256, help="rollouts that the mean is of")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--rows", type=int, default=128, help="of one forward")
    parser.add_argument("--updates", type=int, default=1, help="of the optimiser with each generation")
    parser.add_argument("--passes", type=int, default=1, help="over each generation")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation of the mixture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load(args.config, RunConfig)
    world = World(config)
    model = AutoModelForCausalLM.from_pretrained(
        args.start, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=args.experts
    )
    indices = list(range(args.steps * config.experience.groups_per_step))
    tasks = (world.source.task(Split.TRAIN, index) for index in indices)
    prompts = [[{"role": "user", "content": task.instruction}] for task in tasks]
    recipe = {"lr": args.lr, "rows": args.rows, "updates": args.updates, "passes": args.passes}
    rewards = Rewards(config.experience.groups_per_step * config.experience.group_size, args.window)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(args.out, config, steps=args.steps, **recipe),
        train_dataset=Dataset.from_dict({"prompt": prompts, "index": indices}),
        processing_class=tokenizer(args.start, world),
        environment_factory=lambda: Repair(world),
        callbacks=[
            Progress(
                args.out, args.start, every=args.every, budget_s=args.budget_s, rewards=rewards, enough=args.enough
            )
        ],
    )
    trainer.train()


if __name__ == "__main__":
    main()
