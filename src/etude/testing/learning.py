"""Fakes of engines, policies, the learner and trackers, without weights or files."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from etude.errors import ContextFull, EngineBehind, EngineError
from etude.records.completion import Completion, CompletionRequest, StopReason, Version, VersionSpan
from etude.records.sample import Batch, Published, StepReport
from etude.seams import Engine, EngineInfo, TrackedRun


def make_version(step: int, content: str = "") -> Version:
    """Make a version of weights for tests. Its digest is a hash of `step` and `content`.

    >>> make_version(3).step
    3
    """
    return Version(step=step, incarnation="0" * 8, digest=hashlib.sha256(f"{step} {content}".encode()).hexdigest())


class ScriptedEngine:
    """A fake `Engine` that answers its requests with the given lists of token ids, in order.

    Every token has log-probability -0.5. Its route in each of `num_layers` layers is the expert ``position % 4``,
    `top_k` times. A list is cut after a stop token and at `max_tokens`. When all lists are used, a request raises
    `EngineError`. `step` is the version step of its weights. `requests` lists the served requests."""

    def __init__(
        self,
        answers: Iterable[Sequence[int]],
        *,
        name: str = "engine-0",
        step: int = 0,
        context_tokens: int = 4_096,
        num_layers: int = 2,
        top_k: int = 2,
    ) -> None:
        self.name, self.version, self.context_tokens = name, make_version(step), context_tokens
        self.requests: list[CompletionRequest] = []  # all served requests
        self._answers, self._shape = iter(answers), (num_layers, top_k)
        self._running = asyncio.Event()
        self._running.set()
        self._waiting = 0

    async def generate(self, request: CompletionRequest) -> Completion:
        if len(request.prompt_ids) + request.sampling.max_tokens > self.context_tokens:
            raise ContextFull(
                f"{request.request_id} needs more than {self.context_tokens} tokens", hint="request fewer tokens"
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._running.wait()
        except TimeoutError:
            facts = f"{self.name} stayed paused for {request.deadline_s:g} s"
            raise EngineError(f"{request.request_id} was not served", facts, hint="resume the engine") from None
        finally:
            self._waiting -= 1
        step = self.version.step
        if step < request.min_step or request.pin_step not in (None, step):
            raise EngineBehind(f"{self.name} has step {step}", hint="use another engine, or call `adopt`")
        tokens = next(self._answers, None)
        if tokens is None:
            raise EngineError(f"{self.name} has no answer left", hint="give one token list for every request")
        self.requests.append(request)
        return self.completion(request, list(tokens))

    def completion(self, request: CompletionRequest, tokens: list[int]) -> Completion:
        """Return the completion of a request for which `tokens` were sampled."""
        sampling, reason = request.sampling, StopReason.LENGTH
        for position, token in enumerate(tokens[: sampling.max_tokens]):
            if token in sampling.stop_token_ids:
                tokens, reason = tokens[: position + 1], StopReason.STOP
                break
        tokens = tokens[: sampling.max_tokens]
        end = len(request.prompt_ids) + len(tokens) - 1
        start = end if request.routes_from is None else min(request.routes_from, end)
        positions = np.arange(start, end) % 4
        routes = np.broadcast_to(positions[:, None, None], (len(positions), *self._shape)).astype(np.uint8)
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -0.5, np.float32),
            routes=routes,
            routes_start=start,
            spans=(VersionSpan(self.version, len(tokens)),),
            stop_reason=reason,
            engine=self.name,
        )

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        if min_step > self.version.step:
            self.version = make_version(min_step)
        return self.version

    async def info(self, *, deadline_s: float = 5.0) -> EngineInfo:
        return EngineInfo(
            name=self.name,
            version=self.version,
            paused=not self._running.is_set(),
            context_tokens=self.context_tokens,
            max_sequences=1_000,
            num_running=0,
            num_waiting=self._waiting,
            kv_tokens_free=self.context_tokens,
            capabilities=("routes", "spans", "adopt", "verify"),
        )

    async def verify(self, token_ids: Sequence[int]) -> tuple[Version, list[float]]:
        return self.version, [-0.5] * (len(token_ids) - 1)


class EnginePolicy:
    """A `Policy` that calls one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def complete(self, request: CompletionRequest) -> Completion:
        return await self.engine.generate(request)


class StreamingPolicy(EnginePolicy):
    """A `Policy` that calls one engine and also streams: it yields one token at a time, then the completion.

    A request can be ended while it streams. `num_sampled` counts the tokens that were yielded."""

    engine: ScriptedEngine

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(engine)
        self.num_sampled = 0
        self._ended = set[str]()

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        completion = await self.engine.generate(request)
        tokens = completion.token_ids.tolist()
        for number, token in enumerate(tokens):
            if request.request_id in self._ended:
                completion = self.engine.completion(request, tokens[:number])
                break
            self.num_sampled += 1
            yield [token]
            await asyncio.sleep(0)  # tokens of an engine do not come at once
        yield completion

    async def end(self, request_id: str) -> None:
        self._ended.add(request_id)


class FakeLearner:
    """A fake `Learner` without a model, which begins at `step`.

    Every optimizer step makes a new version. `batches` lists the batches that it got, and `published` the results of
    its publishes."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.batches, self.published = step, list[Batch](), list[Published]()

    def forward_backward(self, batch: Batch) -> StepReport:
        self.batches.append(batch)
        return StepReport(
            num_tokens=sum(len(s.path.token_ids) for s in batch.samples),
            num_sampled=int(sum(s.path.mask.sum() for s in batch.samples)),
            loss=0.0,
            entropy=0.0,
            clip_share=0.0,
            ratio_max=0.0,
            ratio_p99=0.0,
            k1=0.0,
            k3=0.0,
            fresh_ratio_max=None,
            flipped_share=0.0,
            balance_loss=0.0,
            cpu_s=0.0,
        )

    def optim_step(self) -> Mapping[str, float]:
        self.step += 1
        return {"grad_norm": 0.0, "lr": 0.0}

    def save(self, path: str) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "learner.json").write_text(json.dumps({"step": self.step}))

    def load(self, path: str) -> None:
        self.step = int(json.loads((Path(path) / "learner.json").read_text())["step"])

    def publish(self, rollout_ids: Sequence[str]) -> Published:
        done = Published(
            version=make_version(self.step, " ".join(rollout_ids)),
            anchor=not self.published,
            object_bytes=0,
            snapshot_bytes=0,
            bound_bytes=0.0,
            changed_share=0.0,
            encode_s=0.0,
        )
        self.published.append(done)
        return done


class MemoryTracker:
    """A `Tracker` that keeps what it receives in the attributes `run`, `rows` (step, metrics) and `outcome`."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.outcome = ""

    def start(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def finish(self, outcome: str) -> None:
        self.outcome = outcome
