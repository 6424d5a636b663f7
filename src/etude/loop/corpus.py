"""Builds the mid-training corpus from the task source: demonstrations, code documents, standard-library text.

It is a program of its own (``python -m etude.loop.corpus --run DIR``), since it uses only the CPU. It plays
demonstrations on all cores, trains the tokeniser on a sample, and encodes every document once. The corpus has no
function of a held-out or validation task: the program compares the hashes of all functions in the finished texts,
including demonstrations. If the program was killed, it writes all files again."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from etude.capture.context import HISTORY, REQUEST, Carried, go_on, head_of
from etude.environments.memory import MemoryMachine
from etude.errors import EtudeError, TaskError
from etude.harness import ChatFormat, HarnessConfig, chat_template, standard_tools
from etude.harness.chat import SPECIAL_TOKENS, Message
from etude.loop.config import RunConfig, open_tasks, read_config
from etude.loop.processes import EXIT_RESTART
from etude.records.exchange import Exchange
from etude.records.task import Split
from etude.records.wire import I32
from etude.rollouts import demonstrate, demonstrate_long
from etude.run import RunFolder
from etude.tasks import RepairSource, assert_no_heldout, code_documents, library_documents
from etude.tasks.corpus import plugin_documents, text_of
from etude.tasks.scripts import Conversing, Demonstrating, demonstrations
from etude.telemetry import Telemetry
from etude.training.corpus import Answered, write_corpus
from etude.training.tokenizer import train_tokenizer

T = TypeVar("T")

HELDOUT_DOCUMENTS = 96  # demonstrations on validation tasks, for the held-out loss
TOKENIZER_SAMPLE = 1500  # demonstrations for training the tokeniser
CODE_PER_DOCUMENT = 4


def build(run: RunFolder, config: RunConfig, telemetry: Telemetry) -> None:
    """Train the tokeniser of a run and encode its corpus: write the run's folders ``tokenizer`` and ``corpus``."""
    source = _demonstrated_source(config)
    corpus = config.corpus
    code = list(code_documents(count=corpus.num_code_documents, seed=config.seed))
    library = list(library_documents(budget_chars=corpus.library_chars, seed=config.seed))
    with telemetry.span("corpus.demonstrations", count=corpus.num_demonstrations):
        talks = _demonstrate(config)
    held: dict[str, Any] = {"seed": config.seed, "first": 2_000_000, "right_body": 1.0, "split": Split.VALIDATION}
    own = [document for plugin in corpus.sources for document in plugin_documents(plugin, seed=config.seed)]
    own_texts = list(map(text_of, own))
    assert_no_heldout(chain(code, own_texts))
    with telemetry.span("corpus.tokenizer", vocab_size=config.model.vocab_size):
        texts = chain(code[:TOKENIZER_SAMPLE], library, own_texts, *map(_message_texts, talks[:TOKENIZER_SAMPLE]))
        texts = chain(texts, _summary_texts(config, talks[:TOKENIZER_SAMPLE]))
        train_tokenizer(
            texts,
            run / "tokenizer",
            vocab_size=config.model.vocab_size,
            special_tokens=SPECIAL_TOKENS,
            chat_template=chat_template(),
        )
    chat = ChatFormat.load(run / "tokenizer")
    documents: list[I32 | Answered]
    if config.harness.summary_tokens:
        with telemetry.span("corpus.summaries", count=corpus.num_demonstrations):
            documents = [*_in_parallel(_demonstrate_long_part, config, corpus.num_demonstrations, run / "tokenizer")]
        heldout = _play_long(source, HELDOUT_DOCUMENTS, chat, config.harness, **held)
    else:
        signatures = standard_tools(config.harness.tools).signatures
        documents = [chat.encode_conversation(talk, signatures) for talk in talks]
        heldout_talks = _play(source, HELDOUT_DOCUMENTS, config.harness, **held)
        heldout = [chat.encode_conversation(talk, signatures) for talk in heldout_talks]
    documents += [chat.document("".join(some)) for some in _batched(code, CODE_PER_DOCUMENT)]
    most = config.mid_training.longest(config.model.context_tokens)
    documents += [chat.document(text) for text in library]
    documents += [encoded(chat, document, most=most) for document in own]
    random.Random(f"corpus {config.seed}").shuffle(documents)
    write_corpus(run / "corpus", documents, heldout=heldout)
    telemetry.event("corpus.done", documents=len(documents), tokens=sum(map(num_tokens, documents)))


def encoded(chat: ChatFormat, document: str | Exchange, *, most: int) -> I32 | Answered:
    """Encode a document of the corpus. Returns its token ids, int32 [T]; for an exchange an `Answered`, which also has
    the length of the context.

    An exchange is messages with an answer, and only the answer is trained on. Raises `TaskError` for an exchange of
    more than `most` tokens, since a part of it would lack its context. Longer texts are split later."""
    if isinstance(document, str):
        return chat.document(document)
    prompt = chat.encode_prompt(document.messages)
    answer = [*chat.encode(document.answer).tolist(), chat.stop_token_ids[0]]
    if len(prompt) + len(answer) > most:
        facts = f"it has {len(prompt) + len(answer)} tokens, the limit is {most}; it ends with {document.user[-60:]!r}"
        hint = "shorten it, or raise mid_training.document_tokens and batch_tokens, and model.context_tokens"
        raise TaskError("an exchange of the corpus is too long", facts, hint=hint)
    return Answered(np.concatenate([prompt, np.array(answer, np.int32)]), len(prompt))


def num_tokens(document: I32 | Answered) -> int:
    """Return the number of tokens of an encoded document."""
    return len(document.token_ids if isinstance(document, Answered) else document)


def _demonstrated_source(config: RunConfig) -> Demonstrating | Conversing:
    """The tasks that are demonstrated: the run's own if its source has demonstrations; otherwise generated tasks, which
    teach the model the tools before it sees the run's tasks."""
    source, tasks = open_tasks(config, canaries=False), config.tasks
    if isinstance(source, Demonstrating) or (isinstance(source, Conversing) and not config.harness.summary_tokens):
        return source
    return RepairSource(tasks.seed, files=tasks.files, functions_per_file=tasks.functions_per_file)


def _demonstrate(config: RunConfig) -> list[list[Message]]:
    """Play the demonstrations as one conversation each; with summaries, only as many as the tokeniser needs.

    Where a conversation is summarised depends on its tokens, so those are played again with the tokeniser."""
    count = config.corpus.num_demonstrations
    return _in_parallel(
        _demonstrate_part, config, min(count, TOKENIZER_SAMPLE) if config.harness.summary_tokens else count
    )


def _in_parallel(part: Callable[..., list[T]], config: RunConfig, count: int, *rest: Any) -> list[T]:
    """Call `part` for ranges of demonstrations on all cores, and return the results in order."""
    cores = len(os.sched_getaffinity(0))
    cuts = [count * i // cores for i in range(cores + 1)]
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:  # notices when a process is killed
        parts = [pool.submit(part, config, a, b, *rest) for a, b in pairwise(cuts)]
        return list(chain.from_iterable(part.result() for part in parts))


def _demonstrate_part(config: RunConfig, start: int, stop: int) -> list[list[Message]]:
    source, share = _demonstrated_source(config), config.corpus.right_body
    talks = _play(source, stop - start, config.harness, seed=config.seed, first=1_000_000 + start, right_body=share)
    assert_no_heldout(message["content"] for talk in talks for message in talk)
    return talks


def _demonstrate_long_part(config: RunConfig, start: int, stop: int, tokenizer: Path) -> list[I32]:
    source, share, chat = _demonstrated_source(config), config.corpus.right_body, ChatFormat.load(tokenizer)
    documents = _play_long(
        source,
        stop - start,
        chat,
        config.harness,
        seed=config.seed,
        first=1_000_000 + start,
        right_body=share,
        split=Split.TRAIN,
    )
    assert_no_heldout(map(chat.decode, documents))
    return documents


def _play_long(
    source: Demonstrating | Conversing,
    count: int,
    chat: ChatFormat,
    limits: HarnessConfig,
    *,
    seed: int,
    first: int,
    right_body: float,
    split: Split,
) -> list[I32]:
    assert isinstance(source, Demonstrating)  # `_demonstrated_source` returns no other with summaries
    return [
        document
        for i, d in enumerate(
            demonstrations(source, count=count, seed=seed, right_body=right_body, first=first, split=split)
        )
        for document in demonstrate_long(
            d.task,
            d.script,
            chat,
            MemoryMachine({p: t.encode() for p, t in d.task.files.items()}),
            limits,
            group_seed=first + i,
        )
    ]


def _play(
    source: Demonstrating | Conversing,
    count: int,
    limits: HarnessConfig,
    *,
    seed: int,
    first: int,
    right_body: float,
    split: Split = Split.TRAIN,
) -> list[list[Message]]:
    if isinstance(source, Conversing):
        places = range(first, first + count)
        return [source.conversation(split, index, seed=seed, right=right_body) for index in places]
    tools = standard_tools(limits.tools).with_standard()
    return [
        demonstrate(
            d.task,
            d.script,
            tools,
            MemoryMachine({p: t.encode() for p, t in d.task.files.items()}),
            output_chars=limits.output_chars,
        )
        for d in demonstrations(source, count=count, seed=seed, right_body=right_body, first=first, split=split)
    ]


def _message_texts(talk: list[Message]) -> Iterator[str]:
    """The texts between a conversation's special tokens, as the chat format encodes them."""
    for message in talk:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield " ".join([call["function"]["name"], *map(str, call["function"]["arguments"].values())])


def _summary_texts(config: RunConfig, talks: Sequence[list[Message]]) -> Iterator[str]:
    """The texts that the harness adds for summaries, as often as conversations have them."""
    if not config.harness.summary_tokens:
        return
    for number, talk in enumerate(talks):
        carried = Carried("", 1 + number % 8, turns_left=number % config.harness.max_turns, history=HISTORY)
        yield from (REQUEST, str(go_on(head_of(talk), carried)[0]["content"]))


def _batched(items: Sequence[str], size: int) -> Iterator[list[str]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def main() -> int:
    """Build the corpus of the run ``--run DIR``. Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    run = RunFolder.open(parser.parse_args().run)
    try:
        build(run, read_config(run), Telemetry(run / "events" / "corpus.jsonl", process="corpus"))
    except BrokenProcessPool as died:
        print(died, file=sys.stderr)
        return EXIT_RESTART
    except EtudeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
