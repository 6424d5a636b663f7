"""The process of an engine: start, refusals, and exit with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.cli import main
from etude.config import to_plain
from etude.errors import DeadlineExceeded, EngineError
from etude.inference import EngineConfig, EngineGone, HttpEngine, server, serving
from etude.inference.engine import ReferenceEngine
from etude.inference.registry_messages import NO_VERSION
from etude.inference.server import follower_deadline_s, wait_message
from etude.inference.serving import read_token, warn_about_store
from etude.models import Transformer, hf_views
from etude.models.checkpoint import save_model
from etude.records import Version
from etude.stores import DirectoryStore, open_store
from etude.telemetry import read_events
from etude.weights import Channel, Tensor
from etude.weights.chain.signing import Signer

from .helpers import TINY, ask, engine

SETTINGS = EngineConfig(max_sequences=6, chunk_tokens=64, step_tokens=128, max_waiting=9, stall_s=40.0, device="cpu")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    save_model(Transformer(TINY, seed=1), tmp_path / "checkpoint", dtype="bf16")
    argv = [sys.executable, "-m", "etude.inference.server", "--checkpoint", str(tmp_path / "checkpoint")]
    return [*argv, "--store", str(tmp_path / "store"), "--ready-file", str(tmp_path / "ready.json")]


@pytest.fixture
def process(argv: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    events = ["--telemetry", str(tmp_path / "events" / "engine.jsonl"), "--watch-stdin", *SETTINGS.arguments()]
    with subprocess.Popen(
        argv + events, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**ENVIRONMENT, "ETUDE_TOKEN": "t"}
    ) as started:
        yield started
        started.kill()


def test_a_follower_that_hangs_is_noticed_in_half_a_minute_and_later_where_there_is_more_to_decode(
    tmp_path: Path,
) -> None:
    save_model(Transformer(TINY, seed=1), tmp_path / "tiny", dtype="bf16")
    assert 30.0 <= follower_deadline_s(tmp_path / "tiny") < 31.0
    with (tmp_path / "tiny" / "model.safetensors").open("r+b") as weights:
        weights.truncate(2_000_000_000)
    assert follower_deadline_s(tmp_path / "tiny") == 130.0


def ready(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 300)[0], "the engine did not start within 300 s"
    said: dict[str, str] = json.loads(process.stdout.readline())
    return said


def test_it_serves_from_an_empty_store_says_where_and_notices_a_hang(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said = ready(process)
    assert said == json.loads((tmp_path / "ready.json").read_text())
    assert said["pid"] == process.pid

    async def story() -> None:
        async with HttpEngine(said["url"], token="t") as engine:
            version = (await engine.info()).version
            assert version is not None
            assert (version.step, version.incarnation) == (0, "00000000")
            assert len((await engine.generate(ask("r", 20, 8))).token_ids) == 8
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"did not answer request stuck within"):
                await engine.generate(ask("stuck", deadline_s=0.1))
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 120) in (0, -signal.SIGTERM)
            with pytest.raises(EngineGone):
                await engine.info()

    asyncio.run(story())
    events = list(read_events(tmp_path / "events"))
    assert {event["kind"] for event in events} <= {"engine.load", "engine.settings"}
    (settings,) = (event for event in events if event["kind"] == "engine.settings")
    assert {name: settings[name] for name in to_plain(SETTINGS)} == to_plain(SETTINGS)


def test_it_follows_a_chain_in_a_bucket(argv: list[str], s3: str) -> None:
    place = "s3://etude/followed/by-an-engine"
    argv[argv.index("--store") + 1] = place
    version = publish(Channel(open_store(place)), 1, None)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as process:
        try:
            said = ready(process)

            async def story() -> None:
                async with HttpEngine(said["url"]) as engine:
                    assert await engine.adopt(1, deadline_s=60.0) == version

            asyncio.run(story())
        finally:
            process.kill()


def followers(process: subprocess.Popen[bytes]) -> list[int]:
    """The child processes of an engine."""
    return [
        int(pid) for tasks in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in tasks.read_text().split()
    ]


def publish(channel: Channel, step: int, parent: Version | None) -> Version:
    views = hf_views(Transformer(TINY, seed=step))
    tensors = {
        n: Tensor("f32", tuple(v.shape), v.contiguous().numpy().view(np.uint32).ravel()) for n, v in views.items()
    }
    return channel.publish(tensors, step=step, parent=parent, rollout_ids=[]).version


def test_an_engine_whose_follower_is_killed_adopts_the_next_version_and_no_follower_outlives_it(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    said, channel = ready(process), Channel(DirectoryStore(tmp_path / "store"))

    async def story() -> None:
        last: Version | None = None
        async with HttpEngine(said["url"], token="t") as engine:
            for step in (1, 2, 3):
                last = publish(channel, step, last)
                assert await engine.adopt(step, deadline_s=60.0) == last
                ids = [3, 1, 4, 1, 5]
                version, scores = await engine.verify(ids)
                expected = Transformer(TINY, seed=step)(torch.tensor(ids))[0][:-1].log_softmax(-1)
                assert version == last
                assert scores == pytest.approx(expected[range(4), ids[1:]].tolist(), abs=1e-5)
                (follower,) = followers(process)
                if step < 3:
                    os.kill(follower, signal.SIGKILL)

    asyncio.run(story())
    (follower,) = followers(process)
    watched = os.pidfd_open(follower)
    process.kill()
    assert select.select([watched], [], [], 120)[0], f"follower {follower} outlived its engine"
    os.close(watched)
    reasons = [event["reason"] for event in read_events(tmp_path / "events") if event["kind"] == "engine.trouble"]
    assert all("follower's process ended" in reason for reason in reasons)
    assert reasons


def test_an_engine_that_others_can_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_TOKEN", raising=False)
    with pytest.raises(EngineError, match=r"(?s)on 0.0.0.0 needs a token.*ETUDE_TOKEN"):
        read_token("0.0.0.0")
    assert read_token("127.0.0.1") is None


def test_it_ends_when_its_standard_input_does(process: subprocess.Popen[bytes]) -> None:
    ready(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(120) == -signal.SIGKILL


def test_it_dies_with_its_parent(argv: list[str]) -> None:
    parent_code = f"import subprocess, sys; subprocess.Popen({argv!r}); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as parent:
        pid = int(ready(parent)["pid"])
        engine = os.pidfd_open(pid)
        parent.kill()
        assert select.select([engine], [], [], 120)[0], f"engine {pid} outlived its parent"
        os.close(engine)


def test_a_port_in_use_and_a_missing_checkpoint_are_errors_with_a_hint(argv: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run([*argv, "--port", port], capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "hint:" in ended.stderr
    argv[argv.index("--checkpoint") + 1] = str(tmp_path / "nowhere")
    ended = subprocess.run(argv, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert ended.returncode == 1
    assert "no checkpoint at" in ended.stderr
    assert "hint:" in ended.stderr


def test_an_engine_without_weights_reports_the_version_it_waits_for() -> None:
    bare, place = ReferenceEngine(Transformer(TINY, seed=1), version=NO_VERSION, name="west"), "http://home:8800"
    assert wait_message(bare, place, waited_s=1, wait_s=5) == f"west waits for a first version in {place}"
    bare.trouble = "it does not answer"
    assert wait_message(bare, place, waited_s=1, wait_s=5).endswith(f"{place}: it does not answer")
    with pytest.raises(DeadlineExceeded, match="west has no weights from http://home:8800") as error:
        wait_message(bare, place, waited_s=6, wait_s=5)
    assert error.value.facts == "it does not answer; waited 5 s"
    assert not wait_message(engine(step=0), place, waited_s=6, wait_s=5)


def test_a_store_that_cannot_be_reached_is_told_before_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "STORE_TIMEOUT_S", 0.2)
    said: list[str] = []
    warn_about_store(str(tmp_path), said.append)
    assert not said
    warn_about_store(str(tmp_path / "missing"), said.append)
    assert said == [
        f"there is no store at {tmp_path / 'missing'} yet: is it the run's folder of weights, as this machine has it?"
    ]
    warn_about_store("http://127.0.0.1:1", said.append)
    assert said[1].startswith("the store at http://127.0.0.1:1 cannot be read now: ")
    assert not (tmp_path / "missing").exists()


def test_client_and_fleet_need_no_torch() -> None:
    code = "import sys, etude.inference; assert not {'torch', 'transformers', 'uvicorn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.slow
def test_our_own_engine_is_checked_as_those_of_another_make_are(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "check", "reference"]) == 0
    said = capfd.readouterr().out
    assert "exact" in said.splitlines()[0]
    assert "loads versions: step 1, log-probabilities within 0.0e+00 of the learner's" in said


def empty(store: DirectoryStore) -> None:
    for key in store.list(""):
        store.delete(key)


def test_an_engine_with_a_public_key_refuses_what_is_unsigned_or_signed_by_another_by_name(
    argv: list[str], tmp_path: Path
) -> None:
    signer, other = Signer(bytes(range(32))), Signer(bytes(32))
    store = DirectoryStore(tmp_path / "store")
    publish(Channel(store), 1, None)
    argv += ["--public-key", signer.public_key.hex(), "--telemetry", str(tmp_path / "events" / "engine.jsonl")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        try:
            said = ready(process)

            def reasons() -> set[str]:
                events = read_events(tmp_path / "events")
                return {event["reason"] for event in events if event["kind"] == "engine.trouble"}

            async def story() -> None:
                async with HttpEngine(said["url"]) as engine:
                    for signs, reason in ((None, "no signature"), (other, "it is signed with another key")):
                        if signs is not None:
                            empty(store)
                            publish(Channel(store, signer=signs), 1, None)
                        with pytest.raises(EngineError) as refused:
                            await engine.adopt(1, deadline_s=3.0)
                        assert "step 1" in str(refused.value)
                        async with asyncio.timeout(60):
                            while not any(reason in one for one in reasons()):  # noqa: ASYNC110  of another process
                                await asyncio.sleep(0.05)
                    empty(store)
                    version = publish(Channel(store, signer=signer), 2, None)
                    assert await engine.adopt(2, deadline_s=60.0) == version

            asyncio.run(story())
        finally:
            process.kill()
    trusts = "is not signed with the key that this reader trusts"
    assert any(trusts in one and "no signature" in one for one in reasons())
    assert any("it is signed with another key" in one for one in reasons())


@pytest.mark.parametrize(("cores", "threads", "left"), [(2, 1, 1), (8, 3, 5), (1, 1, 1)])
def test_a_follower_takes_no_core_that_the_engine_computes_on(tmp_path, monkeypatch, cores, threads, left):
    asked = {}
    monkeypatch.setattr(server, "FollowerProcess", lambda store, **settings: asked.update(settings))
    monkeypatch.setattr(server.os, "sched_getaffinity", lambda pid: set(range(cores)))
    server._start_follower(server._parser().parse_args(["--store", str(tmp_path), "--threads", str(threads)]))
    assert asked["threads"] == left


@pytest.mark.slow
def test_an_engine_of_two_ranks_serves_and_no_rank_outlives_it(argv: list[str], tmp_path: Path) -> None:
    ranks = EngineConfig(max_sequences=6, context_tokens=512, tensor_parallel=2, device="cpu").arguments()
    with subprocess.Popen([*argv, *ranks, "--degree", "2"], stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        url = ready(process)["url"]

        async def sampled() -> int:
            async with HttpEngine(url) as remote:
                return len((await remote.generate(ask("a"))).token_ids)

        assert asyncio.run(sampled()) == 8
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        [rank] = [c for c in children if b"rank_process" in Path(f"/proc/{c}/cmdline").read_bytes()]
        process.kill()
        process.wait(60)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{rank}/exe").exists():
        assert time.monotonic() < deadline, "the rank is still there"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_cannot_load_its_part_ends_the_start_with_its_error(argv: list[str], tmp_path: Path) -> None:
    for given, told in (["--degree", "1"], "set numerics.degree = 2"), (["--degree", "8"], "cannot be divided by 8"):
        words = [*argv, "--tensor-parallel", "2", "--device", "cpu", *given]
        done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
        assert done.returncode == 2
        assert told in done.stderr
