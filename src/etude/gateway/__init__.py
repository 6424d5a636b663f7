"""An HTTP server with OpenAI's and Anthropic's APIs, over any `Policy`. Usable alone, without torch.

    model = ServedModel(policy, ChatFormat.load("checkpoint"), name="etude", context_tokens=384)
    app = create_app([model], config=config)
    async with serving(app, config=config) as base_url:
        ...

A `Policy` samples completions of token ids; a chat format converts messages to token ids and back. Any OpenAI client
works with ``base_url``. The gateway keeps the tokens of each conversation (`etude.capture`), so it never tokenises a
sampled reply again."""

from etude.gateway.answers import Answer, ResponseHead, make_answer
from etude.gateway.app import Gateway, create_app
from etude.gateway.config import GatewayConfig
from etude.gateway.dialects import DIALECTS, Dialect, new_head
from etude.gateway.errors import RequestRefused
from etude.gateway.http import serving
from etude.gateway.keys import KeyLimits, Keys
from etude.gateway.model import ServedModel
from etude.gateway.requests import ChatRequest

__all__ = [
    "DIALECTS",
    "Answer",
    "ChatRequest",
    "Dialect",
    "Gateway",
    "GatewayConfig",
    "KeyLimits",
    "Keys",
    "RequestRefused",
    "ResponseHead",
    "ServedModel",
    "create_app",
    "make_answer",
    "new_head",
    "serving",
]
