"""vLLM's server as a child process of its adapter, on a Unix socket that only the adapter uses.

It is started with everything that the adapter needs: the token endpoints, and the development endpoints (pause, calls
to its workers), which need no key. Its output is copied to the adapter's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from etude.errors import EngineError
from etude.inference.config import BLOCK_TOKENS, EngineConfig
from etude.inference.external.client import CONTROL_S, Dialect, RouteSource, ServerClient
from etude.inference.external.environment import Environment
from etude.inference.external.process import ServerProcess, server_environ
from etude.inference.vllm import protocol
from etude.inference.vllm.protocol import SERVER
from etude.models.config import ModelConfig

MODULE = "vllm.entrypoints.openai.api_server"
SCHEDULERS = {
    device: f"etude.inference.vllm.scheduling.{name}"
    for device, name in (("cpu", "StrictScheduler"), ("cuda", "StrictAsyncScheduler"))
}
_CPU_LATENT = (512, 64)  # those of DeepSeek-V3 and Kimi K2
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class VllmClient(ServerClient):
    """A client of a vLLM server.

    `gives_routes`: whether the server was started to return routes (experts chosen per token) with its responses."""

    server = SERVER
    dialect: ClassVar[Dialect] = protocol

    def __init__(self, socket: Path, *, name: str, gives_routes: bool = False) -> None:
        super().__init__(socket, name=name)
        self.gives_routes = gives_routes

    async def freeze(self) -> None:
        await self.ask("/pause?mode=keep&clear_cache=false", what="pause")

    async def thaw(self) -> None:
        await self.ask("/resume", what="resume")

    async def label(self, label: str) -> None:
        await self.ask("/update_weight_version", {"new_version": label}, what="label its tokens")

    async def route_source(self, num_moe_layers: int) -> RouteSource:
        """Return where the routes of completions come from.

        The server sends them if it was started with that option. If not, this call makes the worker extension record
        them."""
        if not num_moe_layers:
            return RouteSource(missing="the model has no routers")
        if self.gives_routes:
            return RouteSource(native=True)
        results = await self.call("etude_keep_routes")
        missing = next((one["missing"] for one in results if one["missing"]), "")
        return RouteSource(missing=missing) if missing else RouteSource(kept=True)

    async def take_routes(self, name: str) -> str | None:
        results = await self.call("etude_take_routes", [name])
        return next((one[name] for one in results if name in one), None)

    async def end(self, name: str) -> None:
        await self.ask("/abort_requests", {"request_ids": [f"{protocol.ID_PREFIX}{name}"]}, what="end a request")

    async def call(self, method: str, *args: object, deadline_s: float = CONTROL_S) -> list[Any]:
        """Call a method of the worker extension. Returns the result of each worker.

        Raises `EngineError` if the call fails or takes longer than `deadline_s` seconds."""
        body = {"method": method, "args": args, "timeout": deadline_s}
        data = await self.ask("/collective_rpc", body, what=f"run {method}", deadline_s=deadline_s + 1.0)
        return list(msgspec.json.decode(data)["results"]) if data else []


class VllmProcess(ServerProcess, VllmClient):
    """A vLLM server as a child of this process. `start` makes one."""

    def __init__(
        self, argv: Sequence[str], env: dict[str, str], *, name: str, socket: Path, gives_routes: bool
    ) -> None:
        VllmClient.__init__(self, socket, name=name, gives_routes=gives_routes)
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
    extension: str,
    arguments: Sequence[str],
) -> VllmProcess:
    """Start vLLM with a checkpoint as a child process.

    - `environment`: where vLLM is installed; `model`: the sizes of the checkpoint's model.
    - `name`: the engine's name.
    - `kv_tokens`: the size of the KV cache in tokens.
    - `threads`: the number of CPU threads.
    - `folder`: for its socket and temporary files.
    - `extension`: the import path of the worker extension's class.
    - `arguments`: further command-line arguments.

    Raises `EngineError` if the tested version of vLLM is not installed, or if its CPU build cannot compute the model.
    """
    device, latent = environment.require().device, model.latent
    if device == "cpu" and (why := _cpu_limit(model)):
        hint = "use reference engines, or vLLM on a GPU"
        raise EngineError("this vLLM cannot compute the model", why, hint=hint)
    socket = folder / "vllm.sock"
    argv = [str(environment.python), "-m", "etude.inference.external.launch", MODULE, "--uds", str(socket)]
    argv += ["--model", str(checkpoint), "--dtype", str(config.dtype), "--seed", "0"]
    argv += _grammars(checkpoint)
    argv += ["--max-model-len", str(config.context_tokens + 1)]  # scoring a text samples one token after it
    argv += ["--max-num-seqs", str(config.max_sequences), "--scheduling-policy", "priority"]
    argv += ["--scheduler-cls", SCHEDULERS[device]]
    block = 16 if device == "cpu" and latent is not None else BLOCK_TOKENS  # the only size of CPU_MLA
    argv += ["--enable-prefix-caching", "--block-size", str(block), *_prefill(config, device)]
    blocks = -(-kv_tokens // block) + 1  # vLLM keeps one for itself
    argv += ["--num-gpu-blocks-override", str(blocks), "--enable-prompt-tokens-details"]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", extension]
    if device == "cpu":
        argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(blocks * block * _kv_bytes(model, config))]
    gives_routes = device == "cuda" and bool(model.num_moe_layers)
    argv += ["--enable-return-routed-experts"] if gives_routes else []
    argv += ["--disable-uvicorn-access-log", *arguments]
    return VllmProcess(argv, _vllm_environ(folder, threads), name=name, socket=socket, gives_routes=gives_routes)


def _cpu_limit(model: ModelConfig) -> str:
    """Return why the CPU build cannot compute this model; "" if it can."""
    latent = model.latent
    if latent is None:
        return ""
    if (latent.kv_rank, latent.rope_dim) != _CPU_LATENT:
        return (
            f"its CPU build decodes latents of {' + '.join(map(str, _CPU_LATENT))} numbers (kv_lora_rank +"
            f" qk_rope_head_dim), and the model's have {latent.kv_rank} + {latent.rope_dim}"
        )
    if model.yarn is None:  # 0.32: log-probabilities are off by up to .7; its YaRN does not use the kernel
        return "the kernel of its CPU build for RoPE without YaRN rotates queries of latent attention wrongly"
    return ""


def _grammars(checkpoint: Path) -> list[str]:
    """Return the arguments for grammars. Only the backend "guidance" supports all kinds of them.

    vLLM refuses grammars for a checkpoint without a tokeniser."""
    if not (checkpoint / "tokenizer.json").is_file():
        return ["--skip-tokenizer-init"]
    return ["--structured-outputs-config.backend", "guidance"]


def _prefill(config: EngineConfig, device: str) -> list[str]:
    """Return the arguments for prefill: chunked on a GPU, complete prompts on a CPU.

    The CPU build (0.32) exits when a step ends inside the prompt of a request with a seed ("CPU Generator does not use
    offset"). A step has space for one token of each running request and the longest prompt, so that no prompt waits."""
    tokens = config.step_tokens + config.max_sequences
    if device == "cpu":
        whole = config.context_tokens + 1 + config.max_sequences
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(tokens, whole))]
    return ["--enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]


def _vllm_environ(folder: Path, threads: int) -> dict[str, str]:
    return server_environ(folder, threads) | {
        "VLLM_SERVER_DEV_MODE": "1",  # enables pausing and calls to the workers
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # each process loads `launch`, and so exits with the adapter
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # for the token that is sampled after a scored text
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines that share cores must be able to move
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def _kv_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Return the bytes of one token's keys and values, or latents, in all layers."""
    return model.num_layers * model.cache_layout.numbers * _BYTES[config.dtype]
