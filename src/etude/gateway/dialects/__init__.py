"""The APIs of the gateway, called dialects: chat completions, text completions, Responses, Messages. One module each.

The steps from the body of a request to that of its response, or to the events of a stream:

    dialect = DIALECTS["chat"]
    request = dialect.read(data)                     # a ChatRequest; raises RequestRefused
    head = new_head(request)
    dialect.body(request, head, [answer])            # the body of a response that is not streamed
    stream = dialect.stream(request, head, chat)
    stream.tokens(ids), stream.finish(answer), stream.end()   # the events of a stream
"""

from etude.gateway.dialects import chat, messages, responses, text
from etude.gateway.dialects.dialect import Dialect, EventStream, new_head

DIALECTS: dict[str, Dialect] = {module.DIALECT.name: module.DIALECT for module in (chat, text, responses, messages)}
"""All dialects by name."""

__all__ = ["DIALECTS", "Dialect", "EventStream", "new_head"]
