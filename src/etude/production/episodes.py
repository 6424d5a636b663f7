"""Joins captured answers to episodes: conversations as trees of turns, with the tokens as they were sampled.

An answer continues an earlier one of the same subject and model if its prompt begins with all tokens that the earlier
one read and sampled. Nothing is rendered or tokenised again. An answer that continues nothing begins an episode."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from etude.errors import PrivacyError
from etude.privacy import Captured, Content, Level, PrivacyFolder
from etude.records.completion import Completion, StopReason
from etude.records.rollout import Ending, Rollout, Trace, Turn
from etude.records.task import Split, Task
from etude.records.wire import I32

SOURCE = "production"
"""The name of the task source of production episodes, and of their origin in the metrics of steps."""
SIMULATED = "simulated"
"""The origin of rollouts of tasks in production steps."""
Answer: TypeAlias = tuple[str, int]
"""What names an answer: (id of its response, number of the answer in the response, from 0)."""
MAX_RECORDS = 65_536
"""The largest number of captured answers that are read at once."""


class Episode(NamedTuple):
    """One conversation of one subject, without its tokens.

    - `records`: the captured answers, one for each turn.
    - `kind`: the kind of work: a digest of the system message, "none" without one, "text" for text completions.
    - `sampled`: the number of sampled tokens of each version, by its digest."""

    records: tuple[Captured, ...]
    kind: str
    sampled: Mapping[str, int]

    @property
    def record_ids(self) -> tuple[str, ...]:
        """The ids of its records, in the order of the turns."""
        return tuple(one.record_id for one in self.records)

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers of its turns, without repetition."""
        return tuple(dict.fromkeys((one.response_id, one.answer) for one in self.records))

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
        return sum(self.sampled.values())

    def tokens_of(self, digests: Collection[str]) -> int:
        """Return how many of its tokens were sampled by versions with these digests."""
        return sum(number for digest, number in self.sampled.items() if digest in digests)

    def is_of(self, digests: Collection[str]) -> bool:
        """Return whether all of its tokens were sampled by versions with these digests."""
        return self.tokens_of(digests) == self.num_sampled

    @property
    def last_at(self) -> float:
        """When its last answer was served, Unix time in s."""
        return max(one.at for one in self.records)


_Of: TypeAlias = tuple[str, str, str]  # organisation, subject, model


class OpenEpisodes:
    """Finds the episodes in a privacy folder again and again, and decrypts little each time.

    It keeps the episodes, without tokens or texts, of each subject with each model. Answers are decrypted when the
    subject has a new one, or one less (it was taken, has expired, or may no longer be used), and when an episode is
    read."""

    def __init__(self, folder: PrivacyFolder) -> None:
        self._folder = folder
        self._known = dict[_Of, tuple[list[Captured], list[Episode]]]()

    def find(
        self,
        *,
        since: float,
        limit: int = MAX_RECORDS,
        taken: Callable[[Collection[str]], Collection[str]] = lambda _: (),
    ) -> list[Episode]:
        """Return the episodes of all answers that were served from `since` on (Unix time in s), by their last answer.

        Left out are answers whose subject does not allow training now, that were captured under another level than
        `Level.TRAIN`, without tokens, or unreadable. `limit`: of answers, the oldest ones. `taken`: returns which of
        the given record ids were trained on; an answer that continues one of them begins an episode of its own."""
        found = self._folder.records.served(after=(since, ""), level=Level.TRAIN, limit=limit)
        usable = self._folder.allowed(found, Level.TRAIN)
        usable -= set(taken(usable))
        groups = defaultdict[_Of, list[Captured]](list)
        for one in found:
            if one.record_id in usable:
                groups[one.organisation, one.subject, one.model].append(one)
        before, self._known = self._known, {}
        for key, captured in groups.items():
            known = before.get(key)
            if known is None or known[0] != captured:
                known = captured, [episode for episode, _ in episodes_of(self._served(captured))]
            self._known[key] = known
        episodes = [one for _, of_subject in self._known.values() for one in of_subject]
        return sorted(episodes, key=lambda one: (one.last_at, one.record_ids))

    def read(self, episode: Episode) -> Trace | None:
        """Return the turns of an episode, with the tokens as they were sampled; None if an answer of it was erased."""
        found = episodes_of(self._served(episode.records))
        if [one.record_ids for one, _ in found] == [episode.record_ids]:
            return found[0][1]
        first = episode.records[0]
        self._known.pop((first.organisation, first.subject, first.model), None)  # decrypt them again
        return None

    def _served(self, captured: Iterable[Captured]) -> list[tuple[Captured, Content]]:
        served = list[tuple[Captured, Content]]()
        for one in captured:
            try:
                served.append((one, self._folder.records.read(one)))
            except PrivacyError:
                continue  # erased meanwhile, or damaged: `etude privacy export` names it
        return served


def episodes_of(served: Iterable[tuple[Captured, Content]]) -> list[tuple[Episode, Trace]]:
    """Join answers to episodes with their turns, the oldest first. Answers without tokens or sampling parameters are
    left out."""
    groups = defaultdict[_Of, list[tuple[Captured, Content]]](list)
    for captured, content in served:
        if content.token_ids is not None and len(content.token_ids) and content.sampling and content.spans:
            groups[captured.organisation, captured.subject, captured.model].append((captured, content))
    found = [episode for answers in groups.values() for episode in _of_subject(answers)]
    return sorted(found, key=lambda one: (one[0].last_at, one[0].record_ids))


def _of_subject(answers: Sequence[tuple[Captured, Content]]) -> list[tuple[Episode, Trace]]:
    """Return the episodes of one subject with one model, each with its turns."""
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
    return [(Episode(tuple(records), kind, _sampled_by(turns)), Trace(tuple(turns))) for records, kind, turns in trees]


def _sampled_by(turns: Iterable[Turn]) -> Mapping[str, int]:
    """Return the number of sampled tokens of each version, by its digest."""
    counts = Counter[str]()
    for span in (span for turn in turns for span in turn.completion.spans):
        counts[span.version.digest] += span.num_tokens
    return counts


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


def rollout_of(episode: Episode, trace: Trace, group_id: str) -> Rollout:
    """Return an episode with its turns as the only rollout of a group. Its task has no text of the conversation."""
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
        trace=trace,
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
