"""A served scripted policy with the chat format of a Qwen checkpoint, and the vendors' clients of it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from tests.parity import chats

from etude.gateway import Gateway, GatewayConfig, Keys, ServedModel, create_app, serving
from etude.harness import ChatFormat
from etude.testing import ScriptedEngine, StreamingPolicy

MODEL = "small"


@lru_cache(maxsize=1)
def qwen() -> ChatFormat:
    """The chat format of a checkpoint of Qwen's shape, with tool calls and reasoning."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatFormat.load(chats.make(Path(folder), "qwen"))


def said(text: str) -> list[int]:
    """The tokens of a completion with this text, in which <think> and <tool_call> are the tokens of these names."""
    chat = qwen()
    tokens = chat.tokens.tokenizer
    tokens.encode_special_tokens = False
    try:
        return list(tokens.encode(text + "<|im_end|>", add_special_tokens=False).ids)
    finally:
        tokens.encode_special_tokens = True


CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True)
class Served:
    """A served policy: the clients, what its engine was asked, and the gateway."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient
    engine: ScriptedEngine
    gateway: Gateway


@asynccontextmanager
async def served(
    answers: Sequence[Sequence[int]] = (),
    *,
    policy: Any = None,
    config: GatewayConfig | None = None,
    keys: Keys | None = None,
    key: str = "none",
    context_tokens: int = 4096,
    models: Sequence[str] = (MODEL,),
    chat: ChatFormat | None = None,
) -> AsyncIterator[Served]:
    """Serve a policy; the scripted one gives `answers`, as lists of token ids, in order."""
    chat = chat or qwen()
    engine = ScriptedEngine(answers, context_tokens=context_tokens)
    config = config or GatewayConfig(port=0, drain_s=2.0)
    policy = policy or StreamingPolicy(engine)
    served = [ServedModel(policy, chat, name=m, context_tokens=context_tokens, config=config) for m in models]
    app = create_app(served, config=config, keys=keys)
    async with (
        serving(app, config=config) as url,
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=300) as of_openai,
        anthropic.AsyncAnthropic(
            base_url=url.removesuffix("/v1"), api_key=key, max_retries=0, timeout=300
        ) as of_anthropic,
        httpx.AsyncClient(base_url=url, timeout=300, headers={"authorization": f"Bearer {key}"}) as http,
    ):
        yield Served(of_openai, of_anthropic, http, engine, app.state.gateway)


def run(work: Callable[[], Awaitable[None]], *, limit_s: float = 300) -> None:
    """Run a coroutine function with a time limit."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await work()

    asyncio.run(bounded())
