"""The adapter loads versions into SGLang: a fake server on a socket records its calls and reads the checkpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import EngineError
from etude.inference.config import EngineConfig
from etude.inference.external.engine import ExternalEngine
from etude.inference.sglang.process import SglangClient
from etude.inference.sglang.server import SglangWeightSync
from etude.models import ModelConfig, Transformer, hf_views, load_model, save_model
from etude.records.completion import Version
from etude.stores import MemoryStore
from etude.training.config import LiveWeights
from etude.training.exports import export
from etude.weights import Channel, Follower
from etude.weights.chain.branches import point

SIZES = ModelConfig(
    vocab_size=31,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    expert_size=8,
    num_experts=2,
    top_k=1,
    context_tokens=32,
)
STARTED = Version(step=0, incarnation="0a1b2c3d", digest="ab" * 32)
SWAP = ["/pause_generation", "/update_weights_from_disk", "/update_weight_version", "/continue_generation"]


class Server:
    """A fake server that responds to every call, and reads a checkpoint when it is loaded, as SGLang does."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.loads, self.held = True, dict[str, torch.Tensor]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                told = [line.split(b":") for line in head.lower().split(b"\r\n")]
                size = next((int(line[1]) for line in told if line[0] == b"content-length"), 0)
                path, body = head.split()[1].decode(), json.loads(await reader.readexactly(size) or b"null")
                self.asked.append((path, body))
                if path == "/update_weights_from_disk" and self.loads:
                    self.held = dict(hf_views(load_model(Path(body["model_path"]))))
                answer = json.dumps({"success": self.loads}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


Story = Callable[[SglangWeightSync, Server, Callable[[int], Version]], Awaitable[None]]


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[tuple[SglangWeightSync, Server, Callable[[int], Version]]]:
    server, store = Server(), MemoryStore()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    calls = SglangClient(listening.sockets[0].getsockname()[1], name="engine-1", key="k")
    save_model(Transformer(SIZES, seed=0), folder / "start", dtype="f32")
    config = EngineConfig(max_sequences=1, max_waiting=1, context_tokens=32, pin_lease_s=0.0)
    engine = ExternalEngine(
        calls, name="engine-1", model=SIZES, config=config, version=STARTED, kv_tokens=32, parity="sglang"
    )
    channel = Channel(store)

    def publish(step: int) -> Version:
        tensors = export(Transformer(SIZES, seed=step), LiveWeights.F32)
        return channel.publish(tensors, step=step, parent=None, rollout_ids=[]).version

    try:
        yield (
            SglangWeightSync(engine, Follower(store), start=folder / "start", folder=folder / "next"),
            server,
            publish,
        )
    finally:
        await calls.disconnect()
        listening.close()


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    async def run(story: Story) -> None:
        async with asyncio.timeout(200), world(tmp_path) as (following, server, publish):
            await story(following, server, publish)

    return lambda story: asyncio.run(run(story))


def holds(server: Server, seed: int) -> bool:
    wanted = hf_views(Transformer(SIZES, seed=seed))
    return all(torch.equal(server.held[name], view) for name, view in wanted.items())


def test_a_version_is_loaded_in_a_pause_and_tokens_are_labelled_with_it_before_any_is_sampled(
    tell: Callable[[Story], None],
) -> None:
    async def story(following: SglangWeightSync, server: Server, publish: Callable[[int], Version]) -> None:
        for step in (1, 2):
            server.asked.clear()
            version = publish(step)
            assert await following.step() == following.engine.version == version
            assert [path for path, _ in server.asked] == SWAP
            told = dict(server.asked)
            assert told["/pause_generation"] == {"mode": "in_place"}, "requests in flight stay"
            assert told["/update_weights_from_disk"]["flush_cache"] is False, "and their keys and values"
            assert told["/update_weight_version"]["abort_all_requests"] is False
            assert told["/update_weight_version"]["new_version"] == str(following.engine.adoption)
            assert holds(server, step)
        assert await following.step() is None

    tell(story)


def test_a_branch_is_followed_to_what_it_names_and_back_to_an_earlier_version(tell: Callable[[Story], None]) -> None:
    async def story(following: SglangWeightSync, server: Server, publish: Callable[[int], Version]) -> None:
        old, new, store = publish(1), publish(2), following._chain._store
        following._chain = Follower(store, branch="stable")
        for version in (old, new, old):
            point(store, "policy", version, branch="stable")
            assert await following.step() == following.engine.version == version
            assert holds(server, version.step)
        assert await following.step() is None

    tell(story)


def test_a_version_that_sglang_fails_to_load_is_not_adopted_and_is_tried_again(tell: Callable[[Story], None]) -> None:
    async def story(following: SglangWeightSync, server: Server, publish: Callable[[int], Version]) -> None:
        version, server.loads = publish(1), False
        with pytest.raises(EngineError, match="did not load weights"):
            await following.step()
        assert [path for path, _ in server.asked] == SWAP[:2]
        assert following.engine.version == STARTED
        server.loads = True
        assert await following.step() == following.engine.version == version
        assert server.asked[-1][0] == SWAP[-1]
        assert holds(server, 1)

    tell(story)
