"""Asks the product's agent for edits through the gateway, with OpenAI's client."""

from __future__ import annotations

from types import TracebackType

import openai
from examples.product.edits import TOOL, Answer, read_answer

DEADLINE_S = 120.0
ANSWER_TOKENS = 32


class Agent:
    """The agent behind a gateway. `url`: the base URL that `etude serve` prints. `model`: the name of the run."""

    def __init__(self, url: str, model: str, *, key: str = "none") -> None:
        self.url, self.model, self.key = url, model, key
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, timeout=DEADLINE_S, max_retries=2)

    async def __aenter__(self) -> Agent:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._client.close()

    async def ask(self, text: str, user: str) -> tuple[Answer, str]:
        """Ask for an edit in the name of a user. Returns the answer, and the id of the response for signals.

        `text` is the request as `examples.product.edits.prompt_of` writes it. Raises `openai.OpenAIError`."""
        completion = await self._client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": text}],
            tools=[TOOL],  # type: ignore[list-item]
            temperature=1.0,
            max_tokens=ANSWER_TOKENS,
            extra_headers={"x-etude-user": user},
        )
        return read_answer(completion.choices[0].message), completion.id
