"""Computes a planned step on a GPU, as `runner.Runner` does on a CPU. All data is kept on the device.

Weights, keys and values, the next token and the routes of each slot stay on the device. A step sends a few numbers per
row, and waits once, for its tokens and log-probabilities. Routes are copied when their request ends.

A decode-only step replays a CUDA graph, captured before the first request for each of a few batch sizes: launching a
step's several hundred kernels one by one takes the host longer than the device computes. The batch is padded to the
graph's size with rows of a spare slot. A step with chunks of prompts or with drafts is launched kernel by kernel.

Shapes: B rows of a decoding step, R rows that sample, L layers with a router, K experts per token."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.errors import EngineError
from etude.inference.device_memory import DeviceMemory, DeviceStep
from etude.inference.kv import I64, Span
from etude.inference.runner import NonFiniteReporter, Runner, append_verified, sampled_positions, sampling_rows
from etude.inference.sampler import finish_sampling, is_special
from etude.inference.scheduler import Chunk, Draft, Plan, Sequence
from etude.models import Transformer
from etude.numerics.device import on_device
from etude.numerics.sampling import sample_on_device, uniform
from etude.records.wire import Routes

F32 = npt.NDArray[np.float32]

Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens [R], log-probabilities [R] and logits [R, V] of a step, on the device. Those of a graph hold until its next
replay."""
WARM_UPS = 2
"""Forward passes before a capture: libraries choose algorithms and allocate in the first ones."""


def padded_sizes(max_sequences: int) -> list[int]:
    """Return the batch sizes of the captured CUDA graphs, ascending. At most a third of a batch is padding.

    >>> padded_sizes(40)
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40]
    """
    sizes = {factor << shift for shift in range(max_sequences.bit_length()) for factor in (1, 3)}
    return sorted({max_sequences, *(size for size in sizes if size < max_sequences)})


@dataclass(frozen=True, eq=False)
class _Draws:
    """The inputs of sampling for each row, on the device."""

    slots_R: torch.Tensor  # int64
    uniform_R: torch.Tensor  # float32
    divisor_R1: torch.Tensor  # float32
    greedy_R: torch.Tensor  # bool

    @classmethod
    def of(cls, slots_R: torch.Tensor, draws_3R: torch.Tensor) -> _Draws:
        uniform_R, divisor_R, greedy_R = draws_3R.unbind()
        return cls(slots_R, uniform_R, divisor_R[:, None], greedy_R > 0)


class DeviceRunner:
    """The model, its KV cache, and the next token and routes of each slot, on one device. Same methods as `Runner`.

    `runner_for` makes one. A slot is the memory of one running sequence."""

    def __init__(self, model: Transformer, *, num_slots: int, context_tokens: int) -> None:
        self.model, self.device = model.eval(), model.embedding.device
        sizes = {"num_slots": num_slots, "context_tokens": context_tokens}
        self.kv = DeviceMemory(model.local, model.operators, **sizes, device=self.device)
        routes = (self.kv.num_slots, context_tokens, model.config.num_moe_layers, model.config.top_k)
        kind = {"uint8": torch.uint8, "uint16": torch.int16}[
            model.config.route_dtype
        ]  # dtypes that indexing supports on devices
        self.next_tokens = torch.zeros(self.kv.num_slots, dtype=torch.int64, device=self.device)
        self._routes = torch.zeros(routes, dtype=kind, device=self.device)
        self._non_finite = NonFiniteReporter(model)
        self.graphs: list[_Decode] = []
        if self.device.type == "cuda" and not model.operators.syncs_with_host and model.parallel.degree == 1:
            self._capture(num_slots)

    @torch.inference_mode()
    def _capture(self, num_slots: int) -> None:
        """Capture a graph per batch size, the largest first, since they share a memory pool."""
        with on_device(self.device):
            pool = torch.cuda.graph_pool_handle()
            for size in reversed(padded_sizes(num_slots)):
                graph = _Decode(self, size)
                graph.capture(pool)
                self.graphs.insert(0, graph)

    def synchronize(self) -> None:
        """Wait until all launched kernels are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def routes(self, sequence: Sequence) -> Routes:
        """Return a copy of the routes (chosen experts) that a request wants, as `Runner.routes` does. Waits for the
        device."""
        start, stop = sequence.request.routes_from, sequence.num_computed
        rows = self._routes[sequence.row, stop if start is None else start : stop]
        return rows.cpu().numpy().view(self.model.config.route_dtype)

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[Sequence]:
        """Run the forward pass of a plan and sample. Returns the sequences that sampled tokens, as `Runner.step`."""
        sampling = plan.decode + [c.sequence for c in plan.chunks if c.last]
        with on_device(self.device):
            for copy in plan.copies:
                self.kv.copy(copy.source, copy.target, copy.stop)
                self._routes[copy.target, : copy.stop] = self._routes[copy.source, : copy.stop]
            mixed = plan.chunks or plan.drafts
            tokens, logprobs, logits = self._mixed(plan, sampling) if mixed else self._decode(plan.decode)
            for sequence in plan.decode:
                sequence.num_computed += 1
            for chunk in plan.chunks:
                chunk.sequence.num_computed = chunk.stop
            num = len(sampling)
            rows = num + sum(len(draft.token_ids) for draft in plan.drafts)
            tokens, logprobs = tokens[:rows], logprobs[:rows]
            if any(map(is_special, sampling)):
                tokens, logprobs = finish_sampling(sampling, logits, tokens, logprobs, self.model.operators)
                self.next_tokens[torch.from_numpy(_rows_of(sampling)).to(self.device)] = tokens[:num]
            token_ids, values = self.sampled(tokens, logprobs) if rows else ([], [])
            if plan.drafts:
                drafted = tokens[num:], logprobs[num:], logits[num:]
                self._verify(plan.drafts, drafted, token_ids[num:], values[num:])
        for sequence, token, logprob in zip(sampling, token_ids[:num], values[:num], strict=True):
            sequence.append(token, logprob)
            if not math.isfinite(logprob):
                self._non_finite.report(sequence)
        return sampling + [draft.sequence for draft in plan.drafts]

    def _verify(self, drafts: list[Draft], rows: Sampled, tokens: list[int], logprobs: list[float]) -> None:
        def finish(sequences: list[Sequence], at: list[int]) -> tuple[list[int], list[float]]:
            index = torch.from_numpy(np.array(at, np.int64)).to(self.device)
            tokens_R, logprobs_R, logits_RV = (one[index] for one in rows)
            return self.sampled(*finish_sampling(sequences, logits_RV, tokens_R, logprobs_R, self.model.operators))

        append_verified(drafts, tokens, logprobs, finish, self._non_finite)
        sequences = [draft.sequence for draft in drafts]
        latest = np.array([sequence.token_ids[-1] for sequence in sequences], np.int64)
        slots_R, tokens_R = torch.from_numpy(np.stack([_rows_of(sequences), latest])).to(self.device)
        self.next_tokens[slots_R] = tokens_R

    def sampled(self, tokens_R: torch.Tensor, logprobs_R: torch.Tensor) -> tuple[list[int], list[float]]:
        """Copy sampled tokens and their log-probabilities to the host, and return them as lists.

        Both are sent in one transfer, as float64, which represents them exactly."""
        tokens, logprobs = torch.stack([tokens_R.double(), logprobs_R.double()]).tolist()
        return [int(token) for token in tokens], logprobs

    def _decode(self, sequences: Many[Sequence]) -> Sampled:
        graph = next((g for g in self.graphs if g.size >= len(sequences)), None) or _Decode(self, len(sequences))
        positions = _positions_of(sequences)
        graph.fill(_rows_of(sequences), positions, _draws(sequences, positions + 1))
        return graph.run()

    def _mixed(self, plan: Plan, sampling: list[Sequence]) -> Sampled:
        parts: list[Chunk | Draft] = [*plan.chunks, *plan.drafts]
        spans = [Span(p.sequence.row, p.start, p.stop) for p in parts]
        cache = self.kv.step(_rows_of(plan.decode), _positions_of(plan.decode), spans)
        given = torch.from_numpy(np.concatenate([p.token_ids for p in parts]).astype(np.int64)).to(self.device)
        tokens_N = torch.cat([self.next_tokens[cache.slots[: len(plan.decode)]], given])
        own = [s.num_computed + 1 for s in plan.decode] + [c.stop for c in plan.chunks if c.last]
        owners, own = sampled_positions(sampling, own, plan.drafts)
        rows_R, slots_R = torch.from_numpy(np.stack([sampling_rows(plan), _rows_of(owners)])).to(self.device)
        draws = torch.from_numpy(_draws(owners, np.array(own, np.int64))).to(self.device)
        return self.compute(tokens_N, cache, rows_R, _Draws.of(slots_R, draws))

    def compute(self, tokens_N: torch.Tensor, cache: DeviceStep, rows_R: torch.Tensor | None, draws: _Draws) -> Sampled:
        """Compute one forward pass and sample.

        `rows_R` are the rows whose logits are sampled from; None means all. `draws` has the inputs of sampling for
        them."""
        logits_RV, routes_NLK = self.model(tokens_N, cache, rows=rows_R)
        self._routes[cache.slots, cache.positions] = routes_NLK.view(self._routes.dtype)
        tokens, logprobs = sample_on_device(
            logits_RV, draws.divisor_R1, draws.uniform_R, draws.greedy_R, self.model.operators
        )
        self.next_tokens[draws.slots_R] = tokens
        return tokens, logprobs, logits_RV

    @torch.inference_mode()
    def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability at temperature 1 of each token but the first, as `Runner.score` does."""
        with on_device(self.device):
            tokens = torch.tensor(token_ids).to(self.device)
            logits, _ = self.model(tokens)
            logprobs = self.model.operators.log_softmax(logits[:-1])
            scores: list[float] = logprobs.gather(1, tokens[1:, None])[:, 0].tolist()
        return scores


class _Decode:
    """A decode-only step of one batch size: static input tensors and the CUDA graph that reads them."""

    def __init__(self, runner: DeviceRunner, size: int) -> None:
        device = runner.device
        self.runner, self.size = runner, size
        self._spare = runner.kv.num_slots - 1
        self._inputs = torch.from_numpy(self._padding()).to(device)
        self._draws = torch.ones(3, size, device=device)
        self._starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._out: Sampled | None = None

    def capture(self, pool: Any) -> None:
        """Capture the step in a memory pool that all graphs share, since only one replays at a time."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._out = self._compute()

    def _padding(self) -> I64:
        """Return the slots and positions [2, B] of padding rows."""
        return np.repeat(np.array([[self._spare], [0]], np.int64), self.size, 1)

    def fill(self, slots: I64, positions: I64, draws_3R: F32) -> None:
        """Copy the inputs of this step's rows, padded to the graph's size with rows of the spare slot."""
        inputs, draws = self._padding(), np.ones((3, self.size), np.float32)
        inputs[:, : len(slots)], draws[:, : len(slots)] = (slots, positions), draws_3R
        self._inputs.copy_(torch.from_numpy(inputs))
        self._draws.copy_(torch.from_numpy(draws))

    def run(self) -> Sampled:
        """Compute the step. Returns the results of all rows, including padding."""
        if self.graph is None or self._out is None:
            return self._compute()
        self.graph.replay()
        return self._out

    def _compute(self) -> Sampled:
        slots, positions = self._inputs.unbind()
        cache = self.runner.kv.decoding(slots, positions, self._starts)
        return self.runner.compute(self.runner.next_tokens[slots], cache, None, _Draws.of(slots, self._draws))


def runner_for(
    model: Transformer, *, num_slots: int, context_tokens: int, drafts: bool = False, state_every: int = 0
) -> Runner | DeviceRunner:
    """Return the runner for the model's device: a `Runner` on a CPU, else a `DeviceRunner`.

    With `drafts` it can draft with the model's MTP heads. Raises `EngineError` where that is not possible.
    `state_every`: that of `KVCache`."""
    device = model.embedding.device.type
    if drafts and (device != "cpu" or not len(model.mtp)):
        facts, hint = "the model has no MTP heads", "mid-train it with mid_training.mtp_heads = 1"
        if device != "cpu":
            facts, hint = f"the engine computes on {device}", "use a CPU"
        hint += ", or set engine.speculation = 'look-up' or 'off'"
        raise EngineError("engine.speculation = 'heads' is not possible", facts, hint=hint)
    if device == "cpu":
        sizes = {"num_slots": num_slots, "context_tokens": context_tokens, "state_every": state_every}
        return Runner(model, **sizes, drafts=drafts)
    return DeviceRunner(model, num_slots=num_slots, context_tokens=context_tokens)


def _rows_of(sequences: Many[Sequence]) -> I64:
    return np.array([s.row for s in sequences], np.int64)


def _positions_of(sequences: Many[Sequence]) -> I64:
    """Return the position of the token that each sequence computes next."""
    return np.array([s.num_computed for s in sequences], np.int64)


def _draws(sequences: Many[Sequence], positions: I64) -> F32:
    """Return the inputs of sampling, [3, R].

    They are uniform numbers in [0, 1) for these positions, temperatures (1 if greedy), and 1 for greedy rows."""
    samplings = [s.request.sampling for s in sequences]
    temperatures = np.array([a.temperature for a in samplings], np.float32)
    greedy = temperatures == 0.0
    return np.stack(
        [uniform([a.seed for a in samplings], positions), np.where(greedy, 1.0, temperatures), greedy]
    ).astype(np.float32)
