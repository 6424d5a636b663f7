"""Contract suites for plug-ins: tests of what etude relies on, for your own class.

With pytest, subclass the suite of the kind::

    class TestMyLoss(PolicyLossContract):
        def make(self):
            return MyLoss(clip_low=0.1)

``etude plugins check my_package.module:Name`` runs the same tests without pytest (`results`). Each test makes a new
object. Only the suites that need torch import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from etude.config import Plugin
from etude.corpus.documents import DividedSource, Document, Dropped
from etude.errors import DeadlineExceeded, EngineError, EtudeError, TaskError
from etude.plugins import described
from etude.records.completion import Completion, CompletionRequest
from etude.records.exchange import Exchange
from etude.records.exports import covers
from etude.records.rollout import Ending
from etude.records.task import Answer, Split, Task, Trust
from etude.records.wire import pack, unpack
from etude.seams import TaskSource, TrackedRun
from etude.tasks.corpus import text_of
from etude.tasks.plugin_source import is_conversation
from etude.tasks.scripts import Conversing, Demonstrating, Demonstration, Script

if TYPE_CHECKING:
    import torch

    from etude.harness.episode import AgentRun
    from etude.training.corrections import Corrected
    from etude.training.losses import PolicyLoss, SampledTokens

TEST_S = 60.0
"""Deadline of one test, in seconds."""


class Contract:
    """The base class of contract suites: the tests of one kind of plug-in.

    Each method with a name that begins with ``test_`` is one test."""

    def make(self) -> Any:
        """Return a new plug-in to test."""
        raise NotImplementedError("override make() to return your plug-in")

    @property
    def name(self) -> Plugin:
        """The plug-in's name for errors."""
        made = type(self.make())
        return Plugin(f"{made.__module__}:{made.__qualname__}")


def results(suite: type[Contract], make: Callable[[], Any], *, deadline_s: float = TEST_S) -> Iterator[tuple[str, str]]:
    """Run a suite on a plug-in, which `make` constructs. Yields (test name as text, failure) for each test.

    The failure is "" if the test passed. A test fails when it takes longer than `deadline_s` seconds. Works only in the
    main thread, because a signal ends a test that hangs."""

    def late(_: int, __: FrameType | None) -> None:
        hint = "check what the plug-in waits for"
        raise DeadlineExceeded("the test did not end", f"it took more than {deadline_s:g} s", hint=hint)

    for name in (name for name in dir(suite) if name.startswith("test_")):
        contract = suite()
        contract.make = make  # type: ignore[method-assign]
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        try:
            getattr(contract, name)()
            failure = ""
        except EtudeError as error:
            failure = f"{error.what}: {error.facts}"
        except AssertionError as error:
            failure = str(error) or described(error)
        except Exception as error:  # noqa: BLE001  a plug-in may raise anything
            failure = described(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        yield name.removeprefix("test_").replace("_", " "), failure


class PolicyLossContract(Contract):
    """Contract suite for policy losses: tests what the learner needs of one.

    The interface is `etude.training.losses.PolicyLossFunction`."""

    def loss(self, tokens: SampledTokens) -> PolicyLoss:
        """Compute the loss of these tokens, and check the result as the learner does."""
        from etude.training.learner_plugins import call_loss

        return call_loss(self.name, self.make(), tokens)

    def gradient(self, tokens: SampledTokens) -> torch.Tensor:
        """Compute the gradient of the loss with respect to the learner's log-probabilities: one number per sampled
        token."""
        import torch

        (gradient_R,) = torch.autograd.grad(self.loss(tokens).loss, tokens.logprobs_R)
        return gradient_R

    def test_the_loss_is_a_finite_scalar_with_a_gradient(self) -> None:
        self.loss(sampled_tokens(staleness=0.1))

    def test_one_token_alone_has_a_loss(self) -> None:
        self.loss(sampled_tokens(lengths=(1,)))

    def test_on_policy_the_gradient_raises_tokens_of_positive_advantage(self) -> None:
        tokens = sampled_tokens()
        gain = float((self.gradient(tokens) * tokens.advantages_R).sum())
        assert gain < 0, f"the sum of gradient times advantage is {gain:.4g}: a step would lower the expected reward"

    def test_the_same_tokens_give_the_same_bits(self) -> None:
        import torch

        tokens = sampled_tokens(staleness=0.1)
        function = self.make()
        first, again = (function(tokens).loss.detach() for _ in range(2))
        same = first.shape == again.shape and torch.allclose(first, again, rtol=0, atol=0, equal_nan=True)
        assert same, f"the first call gave {first.tolist()!r}, the second {again.tolist()!r}"

    def test_tokens_are_not_changed(self) -> None:
        import torch

        tokens, same = sampled_tokens(staleness=0.1), sampled_tokens(staleness=0.1)
        self.loss(tokens)
        for name in ("logprobs_R", "sampler_logprobs_R", "advantages_R", "sequence_R"):
            assert torch.equal(getattr(tokens, name), getattr(same, name)), f"{name} was changed in place"

    def test_the_normaliser_divides_the_loss(self) -> None:
        one, ten = (float(self.loss(sampled_tokens(staleness=0.1, normaliser=n)).loss.detach()) for n in (1.0, 10.0))
        assert abs(one - 10 * ten) <= 1e-4 * max(1.0, abs(one)), f"{one:.6g} by 1 and {ten:.6g} by 10"

    def test_the_losses_of_parts_of_a_batch_add_up_to_its_loss(self) -> None:
        lengths, whole = (5, 2, 4), sampled_tokens(lengths=(5, 2, 4), staleness=0.1)
        total, together = 0.0, float(self.loss(whole).loss.detach())
        for sequence in range(len(lengths)):
            total += float(self.loss(_sequence(whole, sequence)).loss.detach())
        facts = f"{together:.6g} together, {total:.6g} as the sum: the learner divides a batch into forward passes"
        assert abs(together - total) <= 1e-4 * max(1.0, abs(together)), facts

    def test_ratios_far_from_one_keep_loss_and_gradient_finite(self) -> None:
        import torch

        for staleness in (-20.0, 20.0):
            gradient_R = self.gradient(sampled_tokens(staleness=staleness))
            assert bool(torch.isfinite(gradient_R).all()), f"log-ratios around {staleness:g} give an infinite gradient"


class CorrectionContract(Contract):
    """Contract suite for corrections of importance ratios: tests what the learner needs of one.

    The interface is `etude.training.corrections.Correction`."""

    def weights(self, tokens: SampledTokens) -> Corrected:
        """Compute the correction for these tokens, and check the result as the learner does."""
        from etude.training.learner_plugins import call_correction

        log_ratio_R = tokens.logprobs_R.detach() - tokens.sampler_logprobs_R
        return call_correction(self.name, self.make(), log_ratio_R, tokens.sequence_R)

    def test_weights_are_finite_and_not_negative(self) -> None:
        for staleness in (-20.0, -0.1, 0.1, 20.0):
            self.weights(sampled_tokens(staleness=staleness))

    def test_where_sampler_and_learner_agree_every_token_weighs_one(self) -> None:
        weight_R = self.weights(sampled_tokens()).weight_R
        assert bool((weight_R - 1).abs().max() < 1e-5), f"the weights are {weight_R.tolist()}"

    def test_the_same_tokens_give_the_same_bits(self) -> None:
        import torch

        first, again = (self.weights(sampled_tokens(staleness=0.1)).weight_R for _ in range(2))
        assert torch.equal(first, again), "two calls gave other weights"

    def test_a_sequence_weighs_the_same_alone_and_among_others(self) -> None:
        import torch

        whole = sampled_tokens(lengths=(5, 2, 4), staleness=0.1)
        together = self.weights(whole).weight_R
        alone = torch.cat([self.weights(_sequence(whole, sequence)).weight_R for sequence in range(3)])
        facts = f"{together.tolist()} among others, {alone.tolist()} alone: a batch is divided into forward passes"
        assert bool(torch.allclose(together, alone, atol=1e-5)), facts


def _raises_task_error(work: Callable[[], object]) -> bool:
    try:
        work()
    except TaskError:
        return True
    return False


def sampled_tokens(
    *, lengths: tuple[int, ...] = (5, 2, 4), staleness: float = 0.0, normaliser: float = 11.0
) -> SampledTokens:
    """Make sampled tokens of sequences with these lengths, with positive and negative advantages.

    `staleness` is the mean difference between the learner's and the sampler's log-probabilities, in nats. `normaliser`
    is the number by which the loss is divided."""
    import torch

    from etude.training.losses import SampledTokens

    generator = torch.Generator().manual_seed(7)
    sampler_R = -3 * torch.rand(sum(lengths), generator=generator)
    spread_R = torch.rand(sum(lengths), generator=generator) + 0.5
    advantages = [1.0 if sequence % 2 == 0 else -0.75 for sequence, length in enumerate(lengths) for _ in range(length)]
    sequences = [sequence for sequence, length in enumerate(lengths) for _ in range(length)]
    return SampledTokens(
        (sampler_R + staleness * spread_R).requires_grad_(),
        sampler_R,
        torch.tensor(advantages),
        torch.tensor(sequences),
        normaliser,
    )


def _sequence(tokens: SampledTokens, sequence: int) -> SampledTokens:
    """The tokens of one sequence, as for a separate forward pass."""
    from etude.training.losses import SampledTokens

    kept_R = tokens.sequence_R == sequence
    return SampledTokens(
        tokens.logprobs_R.detach()[kept_R].requires_grad_(),
        tokens.sampler_logprobs_R[kept_R],
        tokens.advantages_R[kept_R],
        tokens.sequence_R[kept_R] - sequence,
        tokens.normaliser,
    )


class TrackerContract(Contract):
    """Contract suite for trackers: tests what a run needs of an `etude.seams.Tracker`."""

    @contextlib.contextmanager
    def started(self, **changes: Any) -> Iterator[Any]:
        """Yield a started tracker, for a run in a temporary folder. `changes` replace fields of its `TrackedRun`."""
        with tempfile.TemporaryDirectory() as folder:
            config = {"seed": 0, "rl": {"steps": 3}, "harness": {"tools": ["ls"]}}
            run = {"name": "try", "run_id": "try-1", "folder": folder, "resumed": False, "config": config, "facts": {}}
            tracker = self.make()
            tracker.start(TrackedRun(**{**run, **changes}))
            yield tracker

    def test_it_takes_the_numbers_of_a_run(self) -> None:
        with self.started() as tracker:
            for step in (1, 2, 3):
                tracker.log(step, {"rl/loss": -0.5 / step, "rl/reward/mean": 0.25})
            tracker.log(3, {"eval/during/rate": 0.5})
            tracker.finish("finished")

    def test_steps_may_come_again_and_parts_count_by_themselves(self) -> None:
        with self.started() as tracker:
            for name, step in (("mid-training/loss", 900), ("rl/loss", 1), ("rl/loss", 2), ("rl/loss", 1)):
                tracker.log(step, {name: 1.0})
            tracker.finish("stopped")

    def test_a_run_that_fails_at_once_is_finished_without_a_number(self) -> None:
        with self.started() as tracker:
            tracker.finish("failed")

    def test_a_resumed_run_starts_again(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for resumed in (False, True):
                with self.started(folder=folder, resumed=resumed) as tracker:
                    tracker.log(1, {"rl/loss": 1.0})
                    tracker.finish("stopped")

    def test_the_numbers_are_not_changed(self) -> None:
        values = {"rl/loss": 1.0}
        with self.started() as tracker:
            tracker.log(1, values)
            tracker.finish("finished")
        assert values == {"rl/loss": 1.0}, f"log changed its argument: {values}"

    def test_values_may_be_nan_or_infinite_and_names_long(self) -> None:
        with self.started() as tracker:
            tracker.log(1, {"rl/loss": float("nan"), "rl/ratio_max": float("inf"), "rl/k3": float("-inf")})
            tracker.log(1, {f"eval/during/by_family/{'a' * 400} (größer/ä)": 0.5})
            tracker.finish("finished")


class CorpusSourceContract(Contract):
    """Contract suite for corpus sources: tests what mid-training needs of an `etude.tasks.corpus.CorpusSource`."""

    FIRST = 50

    def first(self, seed: int = 0) -> list[str | Exchange]:
        """Return the first documents of a new source."""
        return list(itertools.islice(self.make().documents(seed), self.FIRST))

    def test_documents_are_texts_or_exchanges_with_content(self) -> None:
        documents = self.first()
        assert documents, "there is no document"
        for number, document in enumerate(documents):
            assert isinstance(document, str | Exchange), f"document {number} is {type(document).__name__}"
            learned = document if isinstance(document, str) else document.answer
            assert learned.strip(), f"document {number} has nothing to learn"

    def test_documents_can_be_written_as_utf_8(self) -> None:
        for number, document in enumerate(self.first()):
            try:
                text_of(document).encode()
            except UnicodeEncodeError as error:
                raise AssertionError(f"document {number} cannot be encoded as UTF-8: {error}") from None

    def test_the_same_seed_gives_the_same_documents(self) -> None:
        assert self.first(3) == self.first(3), (
            "two calls with one seed gave other documents: a run could not be resumed"
        )


class DocumentSourceContract(Contract):
    """Tests what `etude corpus build` relies on in a document source (`etude.corpus.DocumentSource`)."""

    FIRST = 200

    def first(self) -> list[Document | Dropped]:
        """Return the first documents, or the reasons for dropped ones, of a new source."""
        return list(itertools.islice(self.make().documents(), self.FIRST))

    def test_it_yields_documents_or_reasons_why_one_is_none(self) -> None:
        found = self.first()
        assert found, "there is no document"
        for number, one in enumerate(found):
            assert isinstance(one, Document | Dropped), f"document {number} is {type(one).__name__}"

    def test_every_document_has_an_id_of_its_own(self) -> None:
        ids = [one.id for one in self.first()]
        again = next((one for one in ids if ids.count(one) > 1), None)
        assert all(ids), "a document has no id"
        assert again is None, f"two documents have the id {again!r}"

    def test_documents_can_be_written_as_utf_8(self) -> None:
        for one in self.first():
            try:
                "".join(text for text in msgspec.structs.astuple(one) if isinstance(text, str)).encode()
            except UnicodeEncodeError as error:
                raise AssertionError(f"{one.id!r}: {error}") from None

    def test_every_call_gives_the_same_documents(self) -> None:
        assert self.first() == self.first(), "two calls gave other documents: a build could not be resumed"

    def test_the_pieces_of_a_divided_source_have_its_documents_in_order(self) -> None:
        source = self.make()
        if isinstance(source, DividedSource):
            pieces = json.loads(json.dumps(list(source.pieces())))
            in_pieces = itertools.chain.from_iterable(map(source.read, pieces))
            assert list(itertools.islice(in_pieces, self.FIRST)) == self.first()


class ToolContract(Contract):
    """Contract suite for tools: tests what the agent loop needs of an `etude.harness.tools.ToolLike`.

    `FILES` are the files of the machine on which the tool is called."""

    FILES: Mapping[str, bytes] = {"calc.py": b"def add(a, b):\n    return a - b\n", "notes/todo.txt": b"mend add\n"}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a valid call on `FILES`. Override it if the defaults are not valid for your tool."""
        values = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
        parameters = self.make().signature.parameters
        return {p.name: "calc.py" if "path" in p.name else values.get(p.kind, "add") for p in parameters if p.required}

    def answered(self, arguments: Mapping[str, Any]) -> str:
        """Call the tool with these arguments as the agent loop does, and return its output."""
        from etude.environments.memory import MemoryMachine
        from etude.harness.commands import Call
        from etude.harness.tools import ToolSet, Workbench, plugin_tool

        tool = plugin_tool(self.name, self.make())
        machine = MemoryMachine(self.FILES)
        bench = Workbench(machine, ("python", "tests.py"), {*self.FILES}, "contract", 5.0, 400)
        return asyncio.run(ToolSet((tool,)).run(Call(tool.signature.name, dict(arguments)), bench))

    def test_its_signature_can_be_shown_to_a_model(self) -> None:
        schema = self.make().signature.to_openai()["function"]
        assert schema["name"].isidentifier(), (
            f"{schema['name']!r} is not a valid name: use letters, digits and underscores"
        )
        assert schema["description"].strip(), "it has no description"

    def test_a_call_is_answered_with_text(self) -> None:
        self.answered(self.arguments())

    def test_an_answer_has_at_most_the_characters_that_are_left(self) -> None:
        answer = self.answered(self.arguments())
        assert len(answer) <= 400, f"the answer has {len(answer)} characters"

    def test_odd_texts_are_answered_and_raise_nothing(self) -> None:
        given = self.arguments()
        for odd in ("", "../../etc/passwd", "no/such/file", "\x00", "é" * 300, "-rf *"):
            self.answered({name: odd if isinstance(value, str) else value for name, value in given.items()})


class TaskSourceContract(Contract):
    """Contract suite for task sources: tests what a run needs of an `etude.seams.TaskSource`.

    `etude tasks check my_package.module:Name` checks in addition, on machines, that the tasks can be solved and are not
    solved already."""

    def some(self, source: TaskSource, split: Split) -> list[Task]:
        """Return the first tasks of a split, at most 8."""
        size = source.size(split)
        return [source.task(split, index) for index in range(8 if size is None else min(size, 8))]

    def test_every_split_has_tasks_that_know_their_place(self) -> None:
        source = self.make()
        for split in Split:
            tasks = self.some(source, split)
            assert tasks or split is Split.TRANSFER, f"the split {split} has no task"
            for index, task in enumerate(tasks):
                is_at = (task.source, task.split, task.index)
                assert is_at == (source.name, split, index), f"task({split}, {index}) says that it is {is_at}"
                assert task.instruction, f"{split} task {index} has no instruction"
                assert task.family, f"{split} task {index} has no family"

    def test_access_is_random_and_repeats(self) -> None:
        source = self.make()
        tasks = self.some(source, Split.TRAIN)
        again = [self.make().task(Split.TRAIN, index) for index in reversed(range(len(tasks)))]
        assert again == tasks[::-1], "the same index gave another task: another process would grade another one"

    def test_the_same_content_is_never_in_two_splits(self) -> None:
        source = self.make()
        ids = [{task.task_id for task in self.some(source, split)} for split in Split]
        assert len(set.union(*ids)) == sum(map(len, ids)), "a task is in two splits"

    def test_past_the_end_and_before_the_start_is_a_task_error(self) -> None:
        source = self.make()
        size = source.size(Split.TRAIN)
        for index in (-1,) if size is None else (-1, size):
            refused = _raises_task_error(lambda: source.task(Split.TRAIN, index))  # noqa: B023  called at once
            assert refused, f"task(train, {index}) must raise TaskError: the split has {size} tasks"

    def test_an_answer_is_one_kind_and_nothing_of_it_is_in_the_task(self) -> None:
        source = self.make()
        for task in self.some(source, Split.HELDOUT):
            answer = source.answer(task)
            kinds = [bool(answer.cases), bool(answer.test_code), answer.tests is not None, answer.verifier is not None]
            assert sum(kinds) == 1, "an answer has cases, or test_code, or tests, or a verifier: one of them"
            assert bool(answer.cases) == (task.trust is Trust.DATA), f"trust is {task.trust}"
            assert bool(answer.test_code) == bool(answer.entry_point), "test_code and entry_point need each other"
            declared = answer.reference_argv or all(covers(task.exports, path) for path in answer.reference)
            assert declared, "the reference writes a file that the task does not export"
            shown = all(text in task.files.values() for text in answer.reference.values())
            assert not shown, "the reference is in the task's files"

    def test_an_answer_is_refused_for_a_task_that_was_changed(self) -> None:
        source = self.make()
        task = source.task(Split.TRAIN, 0)
        files = {path: text + "\n# changed\n" for path, text in task.files.items()}
        other = msgspec.structs.replace(task, files=files, instruction=f"{task.instruction}.")
        refused = _raises_task_error(lambda: source.answer(other))
        assert refused, "answer must raise TaskError for a task whose files or instruction were changed"

    def test_tasks_and_answers_travel_between_processes(self) -> None:
        source = self.make()
        task = source.task(Split.VALIDATION, 0)
        assert unpack(pack(task), Task) == task
        assert source.answer(unpack(pack(task), Task)) == unpack(pack(source.answer(task)), Answer)

    def test_demonstrations_repeat_and_show_their_task(self) -> None:
        source = self.make()
        tasks = self.some(source, Split.TRAIN)[:4]
        if not isinstance(source, Demonstrating):
            return
        for index, task in enumerate(tasks):
            first, again = (source.demonstration(Split.TRAIN, index, seed=1, right=0.5) for _ in range(2))
            assert first.task == task, f"demonstration {index} shows another task"
            calls = self.calls(first)
            assert calls == self.calls(again), f"demonstration {index} is another one the second time"
            assert calls, f"demonstration {index} makes no call"

    def test_conversations_repeat_and_show_their_task(self) -> None:
        source = self.make()
        if not isinstance(source, Conversing):
            return
        for index, task in enumerate(self.some(source, Split.TRAIN)[:4]):
            first, again = (source.conversation(Split.TRAIN, index, seed=1, right=0.5) for _ in range(2))
            assert is_conversation(first), f"conversation {index} is no list of messages with roles, texts and calls"
            assert first == again, f"conversation {index} is another one the second time"
            shown = any(task.instruction in message["content"] for message in first)
            assert shown, f"conversation {index} does not show the instruction of its task"

    def calls(self, demonstration: Demonstration) -> list[Any]:
        """Play a demonstration on a machine in memory with the standard tools, and return its calls.

        The list ends at the first call of any other tool, since its output is not known here."""
        from etude.environments.memory import MemoryMachine
        from etude.harness import standard_tools
        from etude.harness.commands import Call
        from etude.harness.tools import Workbench

        task, tools, calls = demonstration.task, standard_tools(), list[Any]()
        machine = MemoryMachine({path: text.encode() for path, text in task.files.items()})
        bench = Workbench.of(task, machine, key="contract", deadline_s=10.0, output_chars=400)
        with contextlib.suppress(StopIteration):
            calls.append(next(demonstration.script))
            while not bench.submitted and calls[-1][0] in tools.signatures:
                name, arguments = calls[-1]
                call = Call(name, {key: str(value) for key, value in arguments.items()})
                assert not (problem := tools.misfit(call)), f"a demonstration does not fit the tools: {problem}"
                calls.append(demonstration.script.send(asyncio.run(tools.run(call, bench))))
        return calls


class HarnessContract(Contract):
    """Contract suite for agent programs: tests what a rollout needs of an `etude.harness.programs.Harness`.

    Needs `etude[train]`.

    `TASK` is the task that the program gets."""

    TASK = Task(
        source="contract",
        split=Split.TRAIN,
        index=0,
        family="contract",
        instruction="fix the failing test",
        files={"calc.py": "def add(a, b):\n    return a - b\n"},
        exports=("calc.py",),
    )

    def played(self, script: Script | None, *, max_turns: int = 6) -> AgentRun:
        """Run the program once and return its result. `script` makes the calls in place of a model; None: every request
        to the model fails. `max_turns` limits the requests."""
        from etude.environments.memory import MemoryMachine
        from etude.harness import ChatFormat, Episode, HarnessConfig, RequestOptions, chat_template, standard_tools
        from etude.harness.chat import SPECIAL_TOKENS
        from etude.harness.programs import run_plugin
        from etude.rollouts import ScriptedPolicy
        from etude.training.tokenizer import train_tokenizer

        with tempfile.TemporaryDirectory() as folder:
            texts, template = [*self.TASK.files.values(), self.TASK.instruction], chat_template()
            train_tokenizer(texts, folder, vocab_size=384, special_tokens=SPECIAL_TOKENS, chat_template=template)
            chat = ChatFormat.load(Path(folder))
        limits = HarnessConfig(max_turns=max_turns, context_tokens=4096)
        policy = _NoEngine() if script is None else ScriptedPolicy(script, chat)
        machine = MemoryMachine({path: text.encode() for path, text in self.TASK.files.items()})
        options, tools = RequestOptions(session_id="contract", seed=0), standard_tools()

        async def run() -> AgentRun:
            episode = Episode(self.TASK, machine, policy=policy, chat=chat, tools=tools, limits=limits, options=options)
            return await run_plugin(self.name, self.make(), episode)

        return asyncio.run(run())

    def test_a_run_that_submits_ends_so_and_has_its_turns(self) -> None:
        run = self.played(_calls("ls", "submit"))
        assert run.ending is Ending.SUBMITTED, f"it ended as {run.ending}"
        assert run.trace.turns, "it has no turn: nothing of it could be trained on"
        sampled = [len(turn.completion.token_ids) for turn in run.trace.turns]
        assert all(sampled), f"its turns have {sampled} sampled tokens"

    def test_it_keeps_the_limit_of_turns(self) -> None:
        run = self.played(_calls(*["ls"] * 50), max_turns=3)
        assert len(run.trace.turns) <= 3, f"it took {len(run.trace.turns)} turns, and harness.max_turns is 3"
        assert run.ending is not Ending.SUBMITTED, "nothing was submitted"

    def test_an_engine_that_fails_is_no_ending(self) -> None:
        run = self.played(None)
        assert run.ending is None, f"it ended as {run.ending}: the rollout would be graded"
        assert isinstance(run.failure, EngineError), f"its failure is {run.failure!r}"


class _NoEngine:
    async def complete(self, request: CompletionRequest) -> Completion:
        raise EngineError("no engine answers", hint="this is a test")


def _calls(*tools: str) -> Script:
    for tool in tools:
        yield tool, {}
