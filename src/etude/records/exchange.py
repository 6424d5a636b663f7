"""A corpus document with a prompt and an answer, of which only the answer is trained on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """A user's message and the answer to it. Only the tokens of the answer have loss; the rest is their context.

    `system`: the system message; "": none.

    >>> Exchange("Is 7 a prime number?", "yes").messages
    [{'role': 'user', 'content': 'Is 7 a prime number?'}]
    """

    user: str
    answer: str
    system: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages before the answer, in the format of OpenAI's chat completions."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]
