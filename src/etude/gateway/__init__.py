"""The gateway: OpenAI's chat and text completions API over a `Policy` and a chat format. Usable alone, without torch.

    app = create_app(policy, ChatFormat.load("checkpoint"), model="etude", context_tokens=384)
    async with serving(app, config=GatewayConfig(port=8000)) as base_url:
        ...

Any OpenAI client works with ``base_url``. No token of a conversation is tokenised twice (`etude.capture`).
"""

from etude.gateway.app import Gateway, create_app
from etude.gateway.config import GatewayConfig
from etude.gateway.errors import RequestRefused
from etude.gateway.http import serving
from etude.gateway.requests import ChatRequest, read_request

__all__ = [
    "ChatRequest",
    "Gateway",
    "GatewayConfig",
    "RequestRefused",
    "create_app",
    "read_request",
    "serving",
]
