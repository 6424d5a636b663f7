"""Joins captured answers to episodes: conversations as trees of turns, with the tokens as they were sampled.

An answer continues an earlier one of the same subject and model if its prompt begins with all tokens that the earlier
one read and sampled. Nothing is rendered or tokenised again. An answer that continues nothing begins an episode."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from etude.errors import PrivacyError
from etude.privacy import Captured, Content, Level, PrivacyFolder
from etude.records.completion import Completion, StopReason
from etude.records.rollout import Ending, Rollout, Trace, Turn
from etude.records.task import Split, Task
from etude.records.wire import I32

SOURCE = "production"
"""The task source of production episodes, in their tasks."""
MAX_RECORDS = 65_536
"""The largest number of captured answers that are read at once."""


class Episode(NamedTuple):
    """One conversation of one subject.

    - `records`: the captured answers, one for each turn of `trace`.
    - `kind`: the kind of work: a digest of the system message, "none" without one, "text" for text completions.
    - `trace`: the turns, with the tokens as they were sampled."""

    records: tuple[Captured, ...]
    kind: str
    trace: Trace

    @property
    def record_ids(self) -> tuple[str, ...]:
        """The ids of its records, in the order of the turns."""
        return tuple(one.record_id for one in self.records)

    @property
    def response_ids(self) -> tuple[str, ...]:
        """The ids of the responses that the answers are of, without repetition."""
        return tuple(dict.fromkeys(one.response_id for one in self.records))

    @property
    def subject(self) -> str:
        """The digest of its subject."""
        return self.records[0].subject

    @property
    def first_at(self) -> float:
        """When its first answer was served, Unix time in s."""
        return min(one.at for one in self.records)

    @property
    def num_sampled(self) -> int:
        """The number of its sampled tokens."""
        return sum(len(turn.completion.token_ids) for turn in self.trace.turns)

    def tokens_of(self, digests: Collection[str]) -> int:
        """Return how many of its tokens were sampled by versions with these digests."""
        spans = (span for turn in self.trace.turns for span in turn.completion.spans)
        return sum(span.num_tokens for span in spans if span.version.digest in digests)

    def is_of(self, digests: Collection[str]) -> bool:
        """Return whether all of its tokens were sampled by versions with these digests."""
        return self.tokens_of(digests) == self.num_sampled

    @property
    def last_at(self) -> float:
        """When its last answer was served, Unix time in s."""
        return max(one.at for one in self.records)


def find_episodes(
    folder: PrivacyFolder,
    *,
    since: float,
    limit: int = MAX_RECORDS,
    taken: Callable[[Collection[str]], Collection[str]] = lambda _: (),
) -> list[Episode]:
    """Return the episodes of all answers that were served from `since` on (Unix time in s), the oldest first.

    Answers are left out whose subject does not allow training now, that were captured under a lower level, or that
    cannot be read. At most `limit` answers are read, the oldest ones. `taken`: returns those of these record ids that
    were trained on; an answer that continues one of them begins an episode of its own."""
    found = folder.records.served(after=(since, ""), level=Level.TRAIN, limit=limit)
    usable = folder.usable([one.record_id for one in found], Level.TRAIN)
    usable -= set(taken(usable))
    served = list[tuple[Captured, Content]]()
    for captured in found:
        if captured.record_id in usable:
            try:
                served.append((captured, folder.records.read(captured)))
            except PrivacyError:
                continue  # erased meanwhile, or damaged: `etude privacy export` names it
    return episodes_of(served)


def episodes_of(served: Iterable[tuple[Captured, Content]]) -> list[Episode]:
    """Join answers to episodes, the oldest first. Answers without tokens or sampling parameters are left out."""
    groups = defaultdict[tuple[str, str, str], list[tuple[Captured, Content]]](list)
    for captured, content in served:
        if content.token_ids is not None and len(content.token_ids) and content.sampling and content.spans:
            groups[captured.organisation, captured.subject, captured.model].append((captured, content))
    found = [episode for answers in groups.values() for episode in _of_subject(answers)]
    return sorted(found, key=lambda one: (one.last_at, one.record_ids))


def _of_subject(answers: Sequence[tuple[Captured, Content]]) -> list[Episode]:
    """Return the episodes of one subject with one model."""
    ordered = sorted(answers, key=lambda one: (_num_prompt(one[1]), one[0].at, one[0].record_id))
    ends = dict[tuple[int, bytes], tuple[int, int]]()  # (length, digest) of what a turn read and sampled → (tree, turn)
    trees = list[tuple[list[Captured], str, list[Turn]]]()
    for captured, content in ordered:
        prompt = _prompt(content)
        tree, parent, length = _parent(prompt, ends)
        if tree is None:
            tree = len(trees)
            trees.append(([], _kind(content), []))
        records, _, turns = trees[tree]
        turns.append(_turn(captured, content, parent, prompt[length:]))
        records.append(captured)
        whole = np.concatenate([prompt, _sampled(content)])
        ends.setdefault((len(whole), _digest(whole)), (tree, len(turns) - 1))
    return [Episode(tuple(records), kind, Trace(tuple(turns))) for records, kind, turns in trees]


def _parent(
    prompt: I32, ends: dict[tuple[int, bytes], tuple[int, int]]
) -> tuple[int, int, int] | tuple[None, None, int]:
    """Return (tree, turn, length) of the longest earlier context that a prompt begins with; (None, None, 0) if none."""
    hashed, at, best = hashlib.blake2b(digest_size=16), 0, None
    for length in sorted({length for length, _ in ends if length <= len(prompt)}):
        hashed.update(prompt[at:length].astype("<i4").tobytes())
        at = length
        if (found := ends.get((length, hashed.digest()))) is not None:
            best = (*found, length)
    return best or (None, None, 0)


def _turn(captured: Captured, content: Content, parent: int | None, new_ids: I32) -> Turn:
    ids, logprobs, sampling = _sampled(content), content.logprobs, content.sampling
    assert logprobs is not None, "answers without tokens are left out"
    assert sampling is not None, "answers without sampling parameters are left out"
    return Turn(
        parent=parent,
        prompt_ids=new_ids,
        completion=Completion(
            request_id=captured.record_id,
            token_ids=ids,
            logprobs=logprobs,
            routes=np.zeros((0, 0, 0), np.uint8),
            routes_start=0,
            spans=content.spans,
            stop_reason=StopReason.LENGTH if content.finish == "length" else StopReason.STOP,
            engine="served",
        ),
        sampling=sampling,
    )


def rollout_of(episode: Episode, group_id: str) -> Rollout:
    """Return an episode as the only rollout of a group. Its task has no text of the conversation."""
    task = Task(
        source=SOURCE,
        split=Split.TRAIN,
        index=0,
        family=episode.kind,
        problem=episode.records[0].record_id,
        instruction="",
        files={},
        exports=(),
    )
    return Rollout(
        rollout_id=f"{group_id}.0",
        group_id=group_id,
        attempt=0,
        task=task,
        trace=episode.trace,
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=episode.last_at - episode.first_at,
        tool_s=0.0,
    )


def _kind(content: Content) -> str:
    messages: Any = msgspec.json.decode(content.messages)
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        return "text"
    if messages[0].get("role") not in ("system", "developer"):
        return "none"
    return hashlib.blake2b(msgspec.json.encode(messages[0].get("content")), digest_size=8).hexdigest()


def _prompt(content: Content) -> I32:
    assert content.prompt_ids is not None, "answers without tokens are left out"
    return content.prompt_ids


def _sampled(content: Content) -> I32:
    assert content.token_ids is not None, "answers without tokens are left out"
    return content.token_ids


def _num_prompt(content: Content) -> int:
    return 0 if content.prompt_ids is None else len(content.prompt_ids)


def _digest(ids: I32) -> bytes:
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()
