"""The APIs of the gateway, called dialects: chat completions, text completions, Responses, Messages. One module each.

request = DIALECTS["chat"].read(body)               # a ChatRequest, or RequestRefused head = new_head(request)
DIALECTS["chat"].body(request, head, [answer])      # the body of a whole response stream =
DIALECTS["chat"].stream(request, head, chat) stream.tokens(ids), stream.finish(answer), stream.end()   # the events of a
streamed one"""

from etude.gateway.dialects import chat, messages, responses, text
from etude.gateway.dialects.dialect import Dialect, EventStream, new_head

DIALECTS: dict[str, Dialect] = {module.DIALECT.name: module.DIALECT for module in (chat, text, responses, messages)}
"""All dialects by name."""

__all__ = ["DIALECTS", "Dialect", "EventStream", "new_head"]
