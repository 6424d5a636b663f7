"""vLLM's server as a child of its adapter, on a socket of the file system that nobody else reaches.

It is told to serve with everything that the adapter needs: the endpoints of tokens in, tokens out, the development
endpoints (pausing, calls to its workers), which ask for no key. What it prints goes on to the adapter's own output.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from etude.errors import DeadlineExceeded, EngineError
from etude.inference.config import BLOCK_TOKENS, EngineConfig
from etude.inference.lifetime import when_parent_dies
from etude.inference.vllm.environment import Environment, link_package
from etude.inference.vllm.launch import ADAPTER
from etude.inference.vllm.protocol import refused
from etude.models.config import ModelConfig

START_S, STOP_S, CONTROL_S = 570.0, 5.0, 30.0
LAST_LINES = 40
_ERROR = re.compile(r"\b(?!EngineDead)\w+(?:Error|Exception): .*")  # the cause, not that something else has ended
SCHEDULERS = {
    device: f"etude.inference.vllm.scheduling.{name}"
    for device, name in (("cpu", "StrictScheduler"), ("cuda", "StrictAsyncScheduler"))
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Calls:
    """Calls to a vLLM server over its socket. `gives_routes`: it was started to tell routes with its answers."""

    def __init__(self, socket: Path, *, name: str, gives_routes: bool = False) -> None:
        self.name, self.socket, self.gives_routes = name, socket, gives_routes
        self._session: aiohttp.ClientSession | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a server, as far as can be told from here."""
        return self.socket.exists()

    async def disconnect(self) -> None:
        """Close the connections; the next call opens others, in its own event loop. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(self, path: str, body: bytes, *, deadline_s: float = CONTROL_S) -> tuple[int, bytes]:
        """(status, body). Raises `EngineError` where vLLM is gone or late."""
        async with self.answer(path, body, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    async def ask(self, path: str, body: object = None, *, what: str, deadline_s: float = CONTROL_S) -> bytes:
        """The body of an answer of 200. Raises `EngineError`."""
        status, data = await self.post(path, msgspec.json.encode(body), deadline_s=deadline_s)
        if status != 200:
            error = refused(status, data, engine=self.name)
            raise EngineError(f"vLLM of {self.name} was asked {what}", f"{error.what}: {error.facts}", hint=error.hint)
        return data

    async def call(self, method: str, *args: object, deadline_s: float = CONTROL_S) -> list[Any]:
        """What each worker answers to a call of its extension. Raises `EngineError`."""
        body = {"method": method, "args": args, "timeout": deadline_s}
        data = await self.ask("/collective_rpc", body, what=f"for {method}", deadline_s=deadline_s + 1.0)
        return list(msgspec.json.decode(data)["results"]) if data else []

    async def get(self, path: str, *, deadline_s: float) -> tuple[int, bytes]:
        """(status, body). Raises `EngineError`."""
        async with self.answer(path, None, deadline_s=deadline_s) as answer:
            return answer.status, await answer.read()

    @contextlib.asynccontextmanager
    async def answer(
        self, path: str, body: bytes | None, *, deadline_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer, its body yet to be read. Left early, its connection is closed, and vLLM drops the request."""
        timeout, method = aiohttp.ClientTimeout(total=deadline_s), "GET" if body is None else "POST"
        try:
            async with self._connected().request(method, f"http://vllm{path}", data=body, timeout=timeout) as answer:
                yield answer
        except TimeoutError:
            raise EngineError(
                f"vLLM of {self.name} did not answer {path} within {deadline_s:g} s",
                "it lives" if self.alive else "it has ended",
                hint="it hangs, or has too much to do: see the engine's log",
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(
                f"vLLM of {self.name} broke off",
                f"{type(error).__name__}: {error}; it was asked {path}",
                hint="its last words are in the engine's log",
            ) from None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self.socket), limit=0),
                headers={"content-type": "application/json"},
                read_bufsize=1 << 22,  # of a line of a stream, which holds all routes of a request at its end
            )
        return self._session


class Vllm(Calls):
    """A vLLM server as a child of this process. As an async context manager it waits until it serves, and ends it."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], *, name: str, socket: Path, gives_routes: bool
    ) -> None:
        super().__init__(socket, name=name, gives_routes=gives_routes)
        self._last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._errors: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=when_parent_dies,
        )
        self._reader = threading.Thread(target=self._pass_on, name="vllm-output", daemon=True)
        self._reader.start()

    async def __aenter__(self) -> Vllm:
        try:
            await self.until_well()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End it, and everything that it started. Idempotent."""
        await self.disconnect()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self.process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    async def until_well(self) -> None:
        """Wait until it serves. Raises `EngineError` when it ends first, by its own last words."""
        end = time.monotonic() + START_S
        while True:
            if not self.alive:
                self._reader.join(STOP_S)
                raise EngineError(
                    f"vLLM of {self.name} ended while starting",
                    self.last_words() or f"exit code {self.process.returncode}, without a word",
                    hint="its whole output is in the engine's log; etude engines check vllm tries it with a tiny model",
                )
            with contextlib.suppress(EngineError):
                if self.socket.exists() and (await self.get("/health", deadline_s=5.0))[0] == 200:
                    return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"vLLM of {self.name} did not serve within {START_S:g} s",
                    self.last_words(),
                    hint="see the engine's log; where that goes on the host is too busy",
                )
            await asyncio.sleep(0.1)

    def last_words(self) -> str:
        """What it said of why it cannot go on: the last errors that it told, or its last lines."""
        return "; ".join([*dict.fromkeys(self._errors)][-3:] or [line.strip() for line in self._last][-3:])

    def _pass_on(self) -> None:
        assert self.process.stdout is not None, "started with a pipe"
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            self._last.append(text)
            if found := _ERROR.search(text):
                self._errors.append(found[0].strip())
            sys.stdout.write(text)
            sys.stdout.flush()


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
    extension: str,
    arguments: Sequence[str],
) -> Vllm:
    """vLLM over a checkpoint, as a child of this process; `folder` is for its socket. Raises `EngineError` where there
    is no vLLM of a tested version."""
    device = environment.require().device
    socket = folder / "vllm.sock"
    argv = [str(environment.python), "-m", "etude.inference.vllm.launch", "--uds", str(socket)]
    argv += ["--model", str(checkpoint), "--dtype", str(config.dtype), "--skip-tokenizer-init", "--seed", "0"]
    argv += ["--max-model-len", str(config.context_tokens + 1)]  # a text is scored with one token after it
    argv += ["--max-num-seqs", str(config.max_sequences), "--scheduling-policy", "priority"]
    argv += ["--scheduler-cls", SCHEDULERS[device]]
    argv += ["--enable-prefix-caching", "--block-size", str(BLOCK_TOKENS), *_prefill(config, device)]
    blocks = -(-kv_tokens // BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    argv += ["--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", extension]
    if device == "cpu":
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(blocks * BLOCK_TOKENS * _kv_bytes(model, config))]
    gives_routes = device == "cuda" and bool(model.num_moe_layers)
    argv += ["--enable-return-routed-experts"] if gives_routes else []
    argv += ["--disable-uvicorn-access-log", *arguments]
    return Vllm(argv, _environ(folder, threads), name=name, socket=socket, gives_routes=gives_routes)


def _prefill(config: EngineConfig, device: str) -> list[str]:
    """How many tokens a step computes. In chunks on a GPU; whole prompts on a CPU, whose build (0.32) ends when a
    request with a seed has not come to its prompt's end in a step: "CPU Generator does not use offset". Beside a token
    for everybody who runs there is room for the longest: else it would wait for them."""
    tokens = config.step_tokens + config.max_sequences
    if device == "cpu":
        whole = config.context_tokens + 1 + config.max_sequences
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(tokens, whole))]
    return ["--enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]


def _environ(folder: Path, threads: int) -> dict[str, str]:
    """Variables that vLLM's processes see. Nothing of the adapter's own Python."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ETUDE_TOKEN"))}
    return env | {
        ADAPTER: str(os.getpid()),
        "PYTHONPATH": str(link_package(folder)),
        "PYTHONUNBUFFERED": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pausing, and calls to the workers
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # each process loads `launch`, and so ends with the adapter
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the one token that is sampled after a text, and never read
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share cores must be able to move
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TMPDIR": tempfile.gettempdir(),
    }


def _kv_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Of one token's keys and values, over all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _BYTES[config.dtype]
