"""Buckets with faults: a server that hangs, fails, loses or truncates responses; and killed writers.

The server behind the fault proxy is moto, see `tests/s3_server.py`.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from tests.faults.s3_proxy import Proxy
from tests.tiers import first_few

from etude.errors import StoreError
from etude.stores import BucketStore, DirectoryStore, bucket, open_store

LARGE = random.Random(0).randbytes((11 << 20) + 3)
PASSING = ["500", "slow down", "hang", "drop", "swallow"]
SAID = {
    "500": "HTTP 500 InternalError",
    "slow down": "HTTP 503 SlowDown",
    "hang": "no response in time",
    "drop": "the connection was cut",
    "swallow": "the connection was cut",
    "cut": "the response was cut short",
    "shorten": "received",
}
Open = Callable[..., BucketStore]


@pytest.fixture
def proxy(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3, together=3) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy
        proxy.released.set()
        proxy.shutdown()
        thread.join()


@pytest.fixture
def opened(proxy: Proxy, tmp_path: Path) -> Open:
    """Open a store of this test, behind the proxy."""

    def opened(**limits: float) -> BucketStore:
        usual = {"silence_s": 20.0, "part_bytes": 5 << 20}
        return BucketStore(f"s3://etude/{tmp_path.parent.name}/{tmp_path.name}", **(usual | limits))  # type: ignore

    return opened


def patience(trick: str) -> dict[str, float]:
    """How long a store waits for an answer: a second where none comes, and else long enough for a slow machine."""
    return {"silence_s": 1.0} if trick == "hang" else {}


@pytest.mark.parametrize("trick", first_few(["cut", "shorten", *PASSING], 3))
def test_a_read_that_fails_twice_brings_the_right_bytes(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened(**patience(trick))
    store.put("a", LARGE[:100_000])
    proxy.play(trick, trick, on="GET")
    assert store.get("a") == LARGE[:100_000]
    assert proxy.asked["GET"] == 3


@pytest.mark.parametrize("trick", first_few(PASSING, 2))
def test_a_write_that_fails_twice_is_there_once_and_right(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened(**patience(trick))
    proxy.play(trick, trick, on="PUT")
    store.put("a", b"content")
    assert store.get("a") == b"content"
    assert store.list("") == ["a"]


@pytest.mark.parametrize("trick", first_few(PASSING, 2))
def test_listing_and_deleting_outlast_two_failures(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened(**patience(trick))
    store.put("a", b"content")
    proxy.play(trick, trick, on="GET")
    assert store.list("") == ["a"]
    proxy.play(trick, trick, on="DELETE")
    store.delete("a")
    assert store.list("") == []


@pytest.mark.parametrize("trick", first_few(["drop", "500"], 1))
def test_a_part_of_a_large_object_that_fails_is_sent_again(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened()
    proxy.play(trick, trick, on="PUT", path="partNumber=2")
    store.put("large", LARGE)
    assert store.get("large") == LARGE
    assert store.list("") == ["large"]


def test_a_body_that_goes_up_slowly_is_no_silence_and_one_that_hangs_ends(proxy: Proxy, opened: Open) -> None:
    store = opened(silence_s=0.2, attempt_s=2.0, deadline_s=1.0)
    proxy.play("hang", on="PUT")
    with pytest.raises(StoreError, match="no response in time; 1 attempt in 1 s"):
        store.put("a", LARGE[: 1 << 20])


def test_a_large_object_whose_last_answer_got_lost_is_found_to_be_there(proxy: Proxy, opened: Open) -> None:
    store = opened()
    proxy.play("swallow", on="POST", path="large?uploadId")
    store.put("large", LARGE)
    assert store.get("large") == LARGE


def test_of_many_writers_of_a_large_object_one_wins_and_the_others_know(proxy: Proxy, opened: Open) -> None:
    store = opened(silence_s=30.0)
    proxy.play("meet", "meet", "meet", on="POST", path=".tmp/")  # each has seen that nothing is there

    def write(i: int) -> bool:
        try:
            store.put("large", LARGE + b"%d" % i)
        except StoreError:
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        won = list(threads.map(write, range(3)))
    assert sum(won) == 1
    assert store.get("large") == LARGE + b"%d" % won.index(True)
    assert staged(store) == []


@pytest.mark.parametrize("trick", first_few(["cut", "shorten", *PASSING], 3))
def test_a_server_that_never_recovers_is_an_error_with_the_number_of_tries_and_seconds(
    proxy: Proxy, opened: Open, trick: str
) -> None:
    opened().put("a", b"content")
    store = opened(deadline_s=1.5, silence_s=0.5 if trick == "hang" else 1.4)
    proxy.play(*[trick] * 100, on="GET")
    with pytest.raises(StoreError, match="'a' cannot be read from s3://etude/") as caught:
        store.get("a")
    assert re.search(r"[1-9]\d* attempts? in 1\.5 s", caught.value.facts)
    assert SAID[trick] in caught.value.facts
    assert caught.value.hint


def test_an_unreachable_server_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="connection refused") as caught:
        BucketStore("s3://etude/x", deadline_s=0.3).get("a")
    assert "AWS_ENDPOINT_URL" in caught.value.hint


@pytest.mark.parametrize("trick", ["500", "hang", "drop"])
def test_a_swap_that_failed_is_an_error_and_was_sent_once(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened(**patience(trick))
    assert opened().compare_and_swap("pointers/p", None, b"one")
    proxy.play(trick, on="PUT")
    with pytest.raises(StoreError, match="not known whether it was executed"):
        store.compare_and_swap("pointers/p", b"one", b"two")
    assert proxy.asked["PUT"] == 1
    assert store.get("pointers/p") == b"one"


@pytest.mark.parametrize("expected", [None, b"one"])
def test_a_swap_whose_answer_got_lost_is_an_error_and_reading_back_shows_it(
    proxy: Proxy, opened: Open, expected: bytes | None
) -> None:
    store = opened()
    if expected is not None:
        assert store.compare_and_swap("pointers/p", None, expected)
    proxy.play("swallow", on="PUT")
    with pytest.raises(StoreError, match="not known whether it was executed"):
        store.compare_and_swap("pointers/p", expected, b"two")
    assert proxy.asked["PUT"] == 1
    assert store.get("pointers/p") == b"two"


@pytest.mark.parametrize("trick", ["slow down", "conflict"])
def test_a_swap_that_the_server_says_it_did_not_do_is_done_again(proxy: Proxy, opened: Open, trick: str) -> None:
    store = opened()
    assert store.compare_and_swap("pointers/p", None, b"one")
    proxy.play(trick, trick, on="PUT")
    assert store.compare_and_swap("pointers/p", b"one", b"two")
    assert store.get("pointers/p") == b"two"


def test_a_swap_that_finds_a_conflict_each_time_ends_at_its_deadline(proxy: Proxy, opened: Open) -> None:
    store = opened(deadline_s=0.5)
    proxy.play(*["conflict"] * 100, on="PUT")
    with pytest.raises(StoreError, match="between each read and write"):
        store.compare_and_swap("pointers/p", None, b"one")


def test_a_channel_whose_commit_lost_its_answer_has_published_and_a_follower_process_reads_it(
    proxy: Proxy, opened: Open
) -> None:
    import numpy as np

    from etude.weights import Channel, FollowerProcess, Tensor

    store, weights = opened(), np.arange(1000, dtype="<u2")
    proxy.play("swallow", on="PUT", path="pointers/")
    published = Channel(store).publish({"w": Tensor("bf16", (1000,), weights)}, step=0, parent=None, rollout_ids=[])
    with FollowerProcess(store, wait_s=30.0) as follower:
        update = follower.advance()
        assert update is not None
        assert update.version == published.version
        assert bytes(follower.tensors["w"].codes) == weights.tobytes()


def test_an_error_of_denied_access_contains_no_secret(proxy: Proxy, opened: Open) -> None:
    store = opened()
    proxy.play("forbidden")
    with pytest.raises(StoreError, match="HTTP 403 SignatureDoesNotMatch") as caught:
        store.get("a")
    assert proxy.asked["GET"] == 1
    told = "".join(traceback.format_exception(caught.value)) + repr(store) + repr(pickle.dumps(store))
    error: BaseException | None = caught.value
    while error is not None:
        told += str(error)
        error = error.__context__
    assert "AWS_ACCESS_KEY_ID" in told
    for secret in ("an-id", "a-secret", "Signature=", "AWS4-HMAC"):
        assert secret not in told


def test_without_credentials_the_hint_names_the_variables(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreError) as caught:
        BucketStore("s3://etude/x").get("a")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_a_bucket_that_is_not_there_is_an_error_and_not_a_missing_object(s3: str) -> None:
    store = BucketStore("s3://no-such-bucket/x")
    for ask in (
        lambda: store.get("a"),
        lambda: store.put("a", b"x"),
        lambda: store.list(""),
        lambda: store.compare_and_swap("a", None, b"x"),
    ):
        with pytest.raises(StoreError, match="NoSuchBucket"):
            ask()


def test_no_more_requests_are_in_flight_than_allowed(proxy: Proxy, opened: Open) -> None:
    store = opened(max_requests=3, silence_s=30.0)
    proxy.play(*["meet"] * 12, on="PUT")
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda i: store.put(f"a/{i}", b"x"), range(12)))
    store.put("large", LARGE)
    with ThreadPoolExecutor(3) as threads:
        assert all(data == LARGE for data in threads.map(lambda _: store.get("large"), range(3)))
    assert proxy.peak == 3


def test_waiting_for_others_requests_ends_at_the_deadline(proxy: Proxy, opened: Open) -> None:
    store = opened(max_requests=1, silence_s=30.0, deadline_s=0.2)
    proxy.play("hang", on="PUT")
    with ThreadPoolExecutor(1) as threads:
        threads.submit(store.put, "a", b"x")
        assert proxy.hanging.wait(300)
        with pytest.raises(StoreError, match="1 requests were in flight"):
            store.get("a")
        proxy.released.set()


UPLOADS = """
import sys
from etude.stores import BucketStore
BucketStore(sys.argv[1], part_bytes=5 << 20).put("large", bytes(11 << 20))
"""


def test_a_writer_killed_in_a_large_upload_leaves_no_object_and_what_it_left_is_swept(
    proxy: Proxy, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    for path in ("partNumber=2", "large?uploads"):  # in the upload; between upload and copy
        proxy.hanging.clear()
        proxy.play("hang", path=path)
        with subprocess.Popen([sys.executable, "-c", UPLOADS, str(store.location)]) as writer:
            assert proxy.hanging.wait(300)
            writer.kill()
        assert store.list("") == []
        with pytest.raises(KeyError):
            store.get("large")
    monkeypatch.setattr(bucket, "_STRAY_AFTER", timedelta(0))
    store.put("large", LARGE)
    assert store.get("large") == LARGE
    assert staged(store) == []


def staged(store: BucketStore) -> list[str]:
    import obstore
    from obstore.store import S3Store

    client = S3Store(store.location.bucket, prefix=store.location.prefix, client_options={"allow_http": True})
    return [meta["path"] for page in obstore.list(client, ".tmp") for meta in page]


def test_a_forked_process_is_told_to_be_spawned(s3: str) -> None:
    store = open_store("s3://etude/forked")
    assert store.list("") == []
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.list("")
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as told:
        assert "hint: start processes with spawn" in told.read()
    os.waitpid(pid, 0)


APPENDS = """
import sys
from etude.stores import DirectoryStore
store, name = DirectoryStore(sys.argv[1]), sys.argv[2]
for number in range(int(sys.argv[3])):
    done = False
    while not done:
        try:
            before = store.get("pointers/p")
        except KeyError:
            before = None
        done = store.compare_and_swap("pointers/p", before, (before or b"") + f"{name}.{number}\\n".encode())
    print(number, flush=True)
"""


def test_many_writer_processes_of_a_directory_some_killed_lose_no_swap_and_do_none_twice(tmp_path: Path) -> None:
    draw, times = random.Random(7), 25
    with ExitStack() as started:

        def start(name: str, times: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", APPENDS, str(tmp_path), name, str(times)]
            writer = started.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            started.callback(writer.kill)
            return writer

        finishing = {name: start(name, times) for name in "abcd"}
        endless = {name: start(name, 1_000_000) for name in "wxyz"}
        told = {}
        for name, writer in endless.items():  # each is killed wherever it is after so many
            assert writer.stdout is not None
            numbers = [writer.stdout.readline() for _ in range(draw.randrange(1, times))]
            writer.kill()
            told[name] = [int(line) for line in [*numbers, *writer.stdout]]
        for name, writer in finishing.items():
            told[name] = [int(line) for line in writer.communicate(timeout=300)[0].splitlines()]
    store = DirectoryStore(tmp_path)
    swaps = [line.split(".") for line in store.get("pointers/p").decode().splitlines()]
    for name, numbers in told.items():
        held = [int(number) for writer, number in swaps if writer == name]
        assert held == list(range(len(held)))  # none lost, none twice, in order
        assert numbers == held[: len(numbers)]
        assert len(held) - len(numbers) <= (name in endless)  # the last one's answer may have died with its writer
    assert [len(told[name]) for name in finishing] == [times] * 4
    assert store.list("") == ["pointers/p"]
