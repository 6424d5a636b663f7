"""Captured answers become conversations, with the tokens as they were sampled."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.served_answers import served_answer

from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.privacy.records import Captured, Content
from etude.production import Episode, OpenEpisodes, rollout_of
from etude.records.completion import Sampling
from etude.records.rollout import Trace

ACME, BOB = Subject.of("acme"), Subject.of("acme", "bob")


def after(prompt: Any, said: str, new: int = 2) -> Any:
    """The prompt of the next request: what was read and sampled, and some new tokens."""
    sampled = np.frombuffer(said.encode(), np.uint8).astype(np.int32)
    return np.concatenate([prompt, sampled, np.full(new, 7, np.int32)]).astype(np.int32)


def captured(folder: Path, *answers: Any) -> None:
    with PrivacyFolder(folder) as opened:
        opened.consent.set(ACME, Level.TRAIN)
    writer = CaptureWriter(folder)
    for answer in answers:
        writer.offer(msgspec.structs.replace(answer, at=time.time()))  # after the consent
    assert writer.close(60)


def responses(episode: Episode) -> tuple[str, ...]:
    """Return the response ids of an episode's answers."""
    return tuple(response_id for response_id, _ in episode.answers)


class Read(NamedTuple):
    """An episode with its turns."""

    episode: Episode
    trace: Trace


def found(folder: Path, **arguments: Any) -> list[Read]:
    with PrivacyFolder(folder) as opened:
        episodes = OpenEpisodes(opened)
        read = [(one, episodes.read(one)) for one in episodes.find(since=0.0, **arguments)]
    return [Read(one, trace) for one, trace in read if trace is not None]


FIRST = np.arange(5, dtype=np.int32)


def test_answers_that_continue_each_other_are_one_conversation_with_the_tokens_that_were_sampled(
    tmp_path: Path,
) -> None:
    second = after(FIRST, "one")
    third = after(second, "two")
    captured(
        tmp_path,
        served_answer("bob", said="one", prompt_ids=FIRST, response_id="a" * 32),
        served_answer("eve", said="her", prompt_ids=second, response_id="e" * 32),
        served_answer("bob", said="two", prompt_ids=second, response_id="b" * 32),
        served_answer("bob", said="six", prompt_ids=third, response_id="c" * 32),
        served_answer("bob", said="fork", prompt_ids=second, response_id="d" * 32),
        served_answer("bob", said="other", prompt_ids=FIRST + 1, response_id="f" * 32),
    )
    with PrivacyFolder(tmp_path) as folder:
        subject = folder.keys.names(BOB).subject
    bob, other = (one for one in found(tmp_path) if one.episode.subject == subject)
    assert responses(bob.episode) == ("a" * 32, "b" * 32, "d" * 32, "c" * 32)
    assert [turn.parent for turn in bob.trace.turns] == [None, 0, 0, 1]
    assert responses(other.episode) == ("f" * 32,)
    path = bob.trace.path(3)
    assert path.token_ids.tolist() == [*third.tolist(), *b"six"]
    assert path.mask.sum() == len("onetwosix")
    assert all(turn.completion.logprobs[0] == -0.5 for turn in bob.trace.turns)
    assert len(found(tmp_path)) == 3


def test_an_answer_that_continues_one_that_was_trained_on_is_an_episode_with_the_whole_history_before_it(
    tmp_path: Path,
) -> None:
    second = after(FIRST, "one")
    captured(
        tmp_path,
        served_answer("bob", said="one", prompt_ids=FIRST, response_id="a" * 32),
        served_answer("bob", said="two", prompt_ids=second, response_id="b" * 32),
    )
    with PrivacyFolder(tmp_path) as folder:
        [first] = folder.records.of_response("a" * 32)
    [left] = found(tmp_path, taken=lambda _: [first.record_id])
    assert responses(left.episode) == ("b" * 32,)
    assert left.trace.turns[0].prompt_ids.tolist() == second.tolist()


def test_an_answer_is_decrypted_again_only_when_its_subject_has_a_new_one_or_one_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = after(FIRST, "one")
    captured(
        tmp_path,
        served_answer("bob", said="one", prompt_ids=FIRST, response_id="a" * 32),
        served_answer("eve", said="her", prompt_ids=FIRST, response_id="e" * 32),
    )
    with PrivacyFolder(tmp_path) as folder:
        read, decrypted = folder.records.read, list[str]()

        def counted(record: Captured) -> Content:
            decrypted.append(record.response_id[0])
            return read(record)

        monkeypatch.setattr(folder.records, "read", counted)
        episodes = OpenEpisodes(folder)

        def look(*taken: str) -> tuple[list[str], str]:
            """The responses of each episode, and what was decrypted to know them."""
            decrypted.clear()
            ids = [one.record_id for i in taken for one in folder.records.of_response(i * 32)]
            listed = episodes.find(since=0.0, taken=lambda _: ids)
            return sorted("".join(i[0] for i in responses(one)) for one in listed), "".join(sorted(decrypted))

        assert look() == (["a", "e"], "ae")
        assert look() == (["a", "e"], "")
        captured(tmp_path, served_answer("bob", said="two", prompt_ids=second, response_id="b" * 32))
        assert look() == (["ab", "e"], "ab")
        assert look("a") == (["b", "e"], "b")
        assert look("a") == (["b", "e"], "")
        [bob] = [one for one in episodes.find(since=0.0) if responses(one)[0] == "a" * 32]
        folder.consent.set(Subject.of("acme", "eve"), Level.CAPTURE)
        assert look() == (["ab"], "")
        assert episodes.read(bob) is not None
        folder.erase(BOB)
        assert episodes.read(bob) is None
        assert look() == ([], "")


def test_only_what_may_be_trained_on_is_in_an_episode(tmp_path: Path) -> None:
    captured(tmp_path, served_answer("bob"), served_answer("eve", response_id="b" * 32))
    assert len(found(tmp_path)) == 2
    with PrivacyFolder(tmp_path) as folder:
        folder.consent.set(BOB, Level.CAPTURE)
    assert [responses(one.episode) for one in found(tmp_path)] == [("b" * 32,)]
    with PrivacyFolder(tmp_path) as folder:
        folder.erase(Subject.of("acme", "eve"))
    assert found(tmp_path) == []


def test_an_answer_without_tokens_is_no_episode_and_one_with_tokens_says_how_they_were_sampled(tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=3, stop_token_ids=(1,), temperature=0.5, top_p=0.9)
    captured(tmp_path, served_answer("bob", said=""), served_answer("eve", sampling=sampling))
    [episode] = found(tmp_path)
    assert episode.trace.turns[0].sampling == sampling


@pytest.mark.parametrize(
    ("messages", "kind"),
    [("a prompt", "text"), ([1, 2], "text"), ([{"role": "user", "content": "x"}], "none")],
)
def test_the_kind_of_work_is_known_from_the_first_message(tmp_path: Path, messages: Any, kind: str) -> None:
    captured(tmp_path, served_answer("bob", messages=messages))
    assert found(tmp_path)[0].episode.kind == kind


def test_conversations_with_equal_system_messages_are_of_one_kind(tmp_path: Path) -> None:
    texts = ["be brief", "be brief", "be kind"]
    captured(
        tmp_path,
        *(
            served_answer("bob", messages=[{"role": "system", "content": text}], prompt_ids=FIRST + i, said=f"r{i}")
            for i, text in enumerate(texts)
        ),
    )
    kinds = sorted(one.episode.kind for one in found(tmp_path))
    assert len({*kinds}) == 2
    assert all(len(kind) == 16 for kind in kinds)


def test_the_rollout_of_an_episode_has_no_text_in_its_task(tmp_path: Path) -> None:
    captured(tmp_path, served_answer("bob", messages=[{"role": "user", "content": "a secret"}]))
    rollout = rollout_of(*found(tmp_path)[0], "production-1-000000")
    assert rollout.rollout_id == "production-1-000000.0"
    assert b"secret" not in msgspec.json.encode(rollout.task)
    assert rollout.task.family == "none"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=12))
def test_every_answer_is_in_exactly_one_episode_and_every_path_is_what_its_leaf_read(
    talks: list[tuple[int, int]],
) -> None:
    from etude.production import episodes_of

    served, contexts = list[tuple[Captured, Content]](), [FIRST]
    for number, (which, sampled) in enumerate(talks):
        prompt = contexts[which % len(contexts)]
        answer = served_answer(said=chr(97 + sampled) * (sampled + 1), prompt_ids=prompt)
        facts: dict[str, Any] = {"level": Level.TRAIN, "expires": 9e9, "version": "", "key_id": "", "model": "m"}
        names = {"organisation": "o", "subject": "s", "record_id": f"{number:04d}", "response_id": f"{number:04d}"}
        content = Content(
            dialect="chat",
            finish="stop",
            num_prompt=len(prompt),
            num_sampled=sampled + 1,
            messages=b"[]",
            prompt_ids=prompt,
            token_ids=answer.completion.token_ids,
            logprobs=answer.completion.logprobs,
            spans=answer.completion.spans,
            sampling=answer.sampling,
        )
        served.append((Captured(answer=0, at=float(number), **facts, **names), content))
        contexts.append(after(prompt, chr(97 + sampled) * (sampled + 1)))
    episodes = episodes_of(served)
    assert sorted(i for one, _ in episodes for i in one.record_ids) == [captured.record_id for captured, _ in served]
    known = {captured.record_id: content for captured, content in served}
    for one, trace in episodes:
        assert one.num_sampled == sum(len(turn.completion.token_ids) for turn in trace.turns)
        for at, record_id in enumerate(one.record_ids):
            content = known[record_id]
            assert content.prompt_ids is not None
            assert content.token_ids is not None
            assert trace.path(at).token_ids.tolist() == [*content.prompt_ids, *content.token_ids]
