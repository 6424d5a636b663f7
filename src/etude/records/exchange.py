"""Exchange: a document of a corpus whose answer alone is learned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """A user's message and the answer to it. The model learns to write the answer; the rest is only its context.

    `system` is the system message; "" for none.

    >>> Exchange("Is 7 a prime number?", "yes").messages
    [{'role': 'user', 'content': 'Is 7 a prime number?'}]
    """

    user: str
    answer: str
    system: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages before the answer, in OpenAI's format."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]
