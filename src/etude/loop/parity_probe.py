"""The parity probe: after each publish, compares every engine's log-probabilities of a fixed text with the learner's.

Both have the same weights, so that mismatch is measured apart from staleness. Over the budget of `[parity]` the run
stops, the learner takes its next defence, or the alarm is only reported."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping

import numpy as np

from etude.errors import EngineError, EtudeError, ParityError
from etude.evals.parity import compare
from etude.harness.chat import ChatFormat
from etude.inference.client import HttpEngine
from etude.inference.errors import EngineGone, Unauthorised
from etude.loop.parity import Alarm, Defence, OverBudget, ParityConfig, ParityMonitor
from etude.records.sample import Published
from etude.telemetry import Telemetry

PROBE_TOKENS, AGAIN_S = 128, 1.0
ERROR_S, REMOTE_ERROR_S = 30.0, 120.0  # seconds for an engine that reports an error to recover
FETCH_S = 1_800.0  # seconds for any other engine to load a version: weights may be large, and the network slow


class Unreachable(EtudeError):
    """Engines answer, but none can load the published weights: the store is probably damaged."""


class ParityProbe:
    """After each publish, checks that every engine's log-probabilities of a fixed text agree with the learner's.

    The limits are those of `[parity]`. `watch` counts how often an engine exceeds them, and decides when the run
    reacts. `defend` is awaited with the `Defence` (such as replaying the engines' expert choices) that the learner must
    use from then on."""

    def __init__(
        self,
        chat: ChatFormat,
        config: ParityConfig,
        watch: ParityMonitor,
        telemetry: Telemetry,
        defend: Callable[[Defence], Awaitable[None]],
    ) -> None:
        self.text = probe_text(chat)
        self.learner_class = ""  # the learner's parity class
        self._config, self._watch, self._telemetry, self._defend = config, watch, telemetry, defend

    async def run(
        self,
        engines: Mapping[str, HttpEngine],
        published: Published,
        learner_logprobs: list[float],
        *,
        remote: Collection[str] = (),
    ) -> None:
        """Probe every engine with newly published weights, for which the learner computed `learner_logprobs`.

        It waits up to `FETCH_S` seconds for an engine that is loading the weights. An engine that reports an error has
        `ERROR_S` seconds to recover, or `REMOTE_ERROR_S` if its name is in `remote`. Raises `ParityError` if the config
        stops the run at a mismatch, and `Unreachable` when no engine that answers can load the weights."""
        probes = (
            self._probe_engine(name, engine, published, learner_logprobs, REMOTE_ERROR_S if name in remote else ERROR_S)
            for name, engine in engines.items()
        )
        late = await asyncio.gather(*probes)
        if late and all(late):
            hint = "the published weights are probably damaged: run etude weights verify, and check the disk"
            if any(isinstance(error, Unauthorised) for error in late):
                hint = "start the engine with the ETUDE_TOKEN of the run"
            facts = (f"{name}: {str(error).partition(chr(10))[0]}" for name, error in zip(engines, late, strict=True))
            raise Unreachable(f"no engine can load {published.version}", "; ".join(facts), hint=hint)

    async def _probe_engine(
        self, name: str, engine: HttpEngine, published: Published, learner_logprobs: list[float], patience_s: float
    ) -> EngineError | None:
        """Probe one engine. Returns the error of an engine that answers but cannot load the version; otherwise None."""
        loop = asyncio.get_running_loop()
        end = loop.time() + FETCH_S
        while True:
            try:
                await engine.adopt(published.version.step, deadline_s=patience_s)
                version, engine_logprobs = await engine.verify(self.text)
                engine_class = (await engine.info()).parity
                break
            except EngineGone:
                return None  # its successor loads the version before it gets work
            except EngineError as error:
                if isinstance(error, Unauthorised) or loop.time() >= end or await _adoption_error(engine):
                    return error
                await asyncio.sleep(AGAIN_S)
        if version != published.version:
            return None  # it already has a newer version, which has its own probe
        found = compare(engine_logprobs, learner_logprobs)
        self._telemetry.event(
            "engine.probe",
            engine=name,
            step=published.version.step,
            ratio_max=_finite_or_none(found.ratio_max),
            k3=_finite_or_none(found.k3),
            ratio_p99=_finite_or_none(found.ratio_p99),
            same_class=engine_class == self.learner_class,
        )
        alarm = self._watch.record(name, found)
        if alarm is not None:
            self._refuse(alarm, published, engine_class)
            await self._act(alarm, published.version.step)
        return None

    async def trained(self, step: int, fresh_ratio_max: float | None) -> None:
        """Check the largest |r - 1| of tokens that a step's own weights sampled, and use the next defence if it is too
        large.

        r is the learner's probability of a token divided by the engine's. If the config stops the run instead, the
        learner raises the error."""
        alarm = self._watch.trained(fresh_ratio_max)
        if alarm is not None:
            await self._act(alarm, step)

    def _refuse(self, alarm: Alarm, published: Published, engine_class: str) -> None:
        """Raise `ParityError` if the config stops the run at an alarm, and always for numbers that are not finite."""
        found = alarm.found
        no_number = not math.isfinite(found.k3)
        if no_number or self._config.over_budget is OverBudget.STOP:
            raise ParityError(
                f"{alarm.engine} and the learner compute different probabilities with {published.version}",
                f"max |r - 1| = {found.ratio_max:.2e}, k3 = {found.k3:.2e} on the probe, the budget is "
                f"k3 {alarm.budget.k3:g}; parity classes: {engine_class!r}, the learner's {self.learner_class!r}",
                hint=_hint(alarm, engine_class == self.learner_class),
            )

    async def _act(self, alarm: Alarm, step: int) -> None:
        found, taken = alarm.found, str(alarm.defence) if alarm.defence else ""
        self._telemetry.event(
            "parity.alarm", engine=alarm.engine, step=step, k3=found.k3, ratio_max=found.ratio_max, defence=taken
        )
        if alarm.defence is not None:
            await self._defend(alarm.defence)


async def _adoption_error(engine: HttpEngine) -> str:
    """Why an engine cannot load a version; "" while it is still loading it."""
    try:
        return (await engine.info()).trouble
    except EngineError as error:
        return error.what


def _hint(alarm: Alarm, same_class: bool) -> str:
    if alarm.budget.k3:
        return "etude parity RUN names the operator; if it is only rounding, raise parity.k3 and parity.ratio_p99"
    if same_class:
        return "the engine has other weights or computes differently: run etude weights verify, then etude parity"
    return "run engines where the learner runs, or set numerics.mode = 'native'"


def _finite_or_none(number: float) -> float | None:
    """The number for an event; None when it is not finite, since JSON has no infinity."""
    return number if np.isfinite(number) else None


def probe_text(chat: ChatFormat) -> list[int]:
    """Return the token ids of the probe text: drawn from the whole vocabulary without repetition, always the same."""
    order = np.random.default_rng(0).permutation(chat.vocab_size)
    return [int(token) for token in order[:PROBE_TOKENS]]
