"""One answer that the gateway served, as those who keep or judge it receive it."""

from __future__ import annotations

from typing import Any

import msgspec

from etude.records.completion import Completion, Sampling
from etude.records.wire import I32

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What the APIs put before the id of a response."""


def without_prefix(response_id: str) -> str:
    """Return the id of a response without the prefix of its API, as `ServedAnswer.response_id`.

    >>> without_prefix("chatcmpl-0a1b"), without_prefix("0a1b")
    ('0a1b', '0a1b')
    """
    prefix = next((one for one in PREFIXES if response_id.startswith(one)), "")
    return response_id.removeprefix(prefix)


class ServedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One complete answer to a request.

    - `response_id`: the id of the response without its prefix, hexadecimal; `index`: the number of the answer within
      the response.
    - `organisation`: the name of the API key; "local" for a gateway without keys. `user`: whom the client named, or "".
    - `model`, `dialect`: the names of the model and of the API.
    - `at`: the Unix time in seconds at which the answer was complete.
    - `messages`: the conversation, or the prompt of a text completion: a text or token ids.
    - `reply`: the answer as a message.
    - `finish`: "stop", "length" or "tool_calls".
    - `prompt_ids`: the token ids that the model read, [P] int32; `completion`: what it sampled; `sampling`: how.
    - `summary_tokens`: the numbers of tokens that were read and sampled for new summaries of the conversation."""

    response_id: str
    index: int
    organisation: str
    user: str
    model: str
    dialect: str
    at: float
    messages: Any
    reply: dict[str, Any]
    finish: str
    prompt_ids: I32
    completion: Completion
    sampling: Sampling
    summary_tokens: tuple[int, int] = (0, 0)
