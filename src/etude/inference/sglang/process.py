"""SGLang's server as a child process of its adapter, on a loopback port with a secret key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from etude.errors import EngineError
from etude.inference.config import EngineConfig
from etude.inference.external.client import Dialect, RouteSource, ServerClient
from etude.inference.external.environment import Environment
from etude.inference.external.process import ServerProcess, server_environ
from etude.inference.sglang import protocol
from etude.inference.sglang.protocol import SERVER
from etude.models.config import ModelConfig

MODULE = "sglang.launch_server"
LOAD_S, FORGET_S = 600.0, 10.0
RESERVED_TOKENS = 7
"""Tokens of a context that SGLang does not accept as input: it needs more than five left, and one for itself."""
CPU_ARGUMENTS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
NO_END_TOKEN = json.dumps({"eos_token_id": None})
"""Removes the model's end token, so that a request's stop tokens are the only ones. SGLang's `ignore_eos` would ignore
those too."""


class SglangClient(ServerClient):
    """A client of an SGLang server. `gives_routes`: the server was started to return routes with its responses."""

    server = SERVER
    dialect: ClassVar[Dialect] = protocol

    def __init__(self, port: int, *, name: str, key: str, gives_routes: bool = False) -> None:
        super().__init__(port, name=name, headers={"authorization": f"Bearer {key}"})
        self.gives_routes = gives_routes
        self._forgetting: set[asyncio.Task[None]] = set()

    async def freeze(self) -> None:
        await self.ask("/pause_generation", {"mode": "in_place"}, what="pause")

    async def thaw(self) -> None:
        await self.ask("/continue_generation", {}, what="resume")

    async def label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self.ask("/update_weight_version", body, what="label its tokens")

    async def load(self, checkpoint: Path) -> None:
        """Load weights from a checkpoint directory during a pause. Running requests keep their KV cache."""
        body = {"model_path": str(checkpoint), "flush_cache": False, "load_format": "auto"}
        data = await self.ask("/update_weights_from_disk", body, what="load weights", deadline_s=LOAD_S)
        if not msgspec.json.decode(data).get("success"):
            raise EngineError(
                f"SGLang of {self.name} did not load weights", repr(data[:500]), hint="see the engine's log"
            )

    async def route_source(self, num_moe_layers: int) -> RouteSource:
        if not num_moe_layers:
            return RouteSource(missing="the model has no routers")
        return RouteSource(native=True) if self.gives_routes else RouteSource(missing="it was started without routes")

    async def take_routes(self, name: str) -> str | None:
        """Return None, since routes come with the responses."""
        return None

    def forget(self, name: str) -> None:
        """Have the server abort the request `name`. SGLang notices a closed connection only after seconds."""
        task = asyncio.ensure_future(self._abort(name))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def end(self, name: str) -> None:
        await self.ask("/abort_request", {"rid": name}, what="end a request", deadline_s=FORGET_S)

    async def _abort(self, name: str) -> None:
        with contextlib.suppress(EngineError):  # it is gone, and the request with it
            await self.end(name)


class SglangProcess(ServerProcess, SglangClient):
    """An SGLang server as a child of this process. `start` makes one."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], *, name: str, port: int, key: str, gives_routes: bool
    ) -> None:
        SglangClient.__init__(self, port, name=name, key=key, gives_routes=gives_routes)
        self.launch(argv, env)


def start(
    environment: Environment,
    checkpoint: Path,
    *,
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    kv_tokens: int,
    threads: int,
    folder: Path,
    arguments: Sequence[str],
) -> SglangProcess:
    """Start SGLang with a checkpoint as a child process.

    - `name`: the engine's name.
    - `kv_tokens`: the size of the KV cache in tokens.
    - `threads`: the number of CPU threads.
    - `folder`: for temporary files.
    - `arguments`: further command-line arguments.

    Raises `EngineError` when the tested version of SGLang is not installed."""
    device = environment.require().device
    port, key, gives_routes = _free_port(), secrets.token_hex(16), device == "cuda" and model.num_moe_layers > 0
    argv = [str(environment.python), "-m", "etude.inference.external.launch", MODULE]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--api-key", key]
    argv += ["--model-path", str(checkpoint), "--dtype", str(config.dtype)]
    if not any(argument.startswith("--grammar-backend") for argument in arguments):
        argv += ["--skip-tokenizer-init"]  # only grammars need the tokeniser
    argv += ["--context-length", str(config.context_tokens + RESERVED_TOKENS)]
    argv += ["--max-running-requests", str(config.max_sequences)]
    argv += ["--max-total-tokens", str(kv_tokens + RESERVED_TOKENS)]
    argv += ["--chunked-prefill-size", str(config.step_tokens), "--random-seed", "0", "--sleep-on-idle"]
    argv += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0"]
    argv += ["--incremental-streaming-output", "--weight-version", "0", "--log-level", "warning"]
    argv += ["--json-model-override-args", NO_END_TOKEN]
    argv += ["--enable-return-routed-experts"] if gives_routes else []
    argv += ["--enable-deterministic-inference"] if device == "cuda" else [*CPU_ARGUMENTS, "--disable-cuda-graph"]
    argv += arguments
    env = server_environ(folder, threads) | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    return SglangProcess(argv, env, name=name, port=port, key=key, gives_routes=gives_routes)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
