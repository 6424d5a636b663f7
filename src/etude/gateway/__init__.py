"""An HTTP server with OpenAI's chat and text completions API, over any `Policy`. Usable alone, without torch.

    app = create_app(policy, ChatFormat.load("checkpoint"), model="etude", context_tokens=384)
    async with serving(app, config=GatewayConfig(port=8000)) as base_url:
        ...

A `Policy` samples completions of token ids; a chat format converts messages to token ids and back. Any OpenAI client
works with ``base_url``. The gateway keeps the tokens of each conversation (`etude.capture`), so it never tokenises a
sampled reply again."""

from etude.gateway.answers import Answer, ResponseHead, make_answer
from etude.gateway.app import Gateway, create_app
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS, Dialect, EventStream, new_head
from etude.gateway.errors import RequestRefused
from etude.gateway.http import serving
from etude.gateway.requests import ChatRequest

__all__ = [
    "DIALECTS",
    "Answer",
    "ChatRequest",
    "Dialect",
    "EventStream",
    "Gateway",
    "GatewayConfig",
    "RequestRefused",
    "ResponseHead",
    "create_app",
    "make_answer",
    "new_head",
    "serving",
]
