"""What stands before or in place of a rollout's endpoints while an agent is played: a recorder, or a gateway.

`python -m tests.harnesses.fronts [NAMES]` records each agent that is installed (see `tests.harnesses.traffic`)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from tests.harnesses import traffic
from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import ANSWERS, Answers, Front, config_of, counted, play, qwen

from etude.gateway import GatewayConfig, ServedModel, create_app
from etude.gateway.dialects import DIALECTS
from etude.gateway.dialects.messages import BILLING
from etude.records import Completion, CompletionRequest
from etude.rollouts.endpoints import RolloutEndpoints
from etude.rollouts.scripted import scripted_completion

MODEL, CONTEXT_TOKENS = "etude", 200_000
ENDPOINTS: Front = RolloutEndpoints.__call__  # `play` replaces the attribute
SAID = ("calc.py", "SUBMIT", BILLING)  # in the texts of the scripted model and of the task; a line that changes


def recorder(exchanges: list[traffic.Exchange]) -> Front:
    """The endpoints, with a note of each request for a completion."""

    async def front(endpoints: RolloutEndpoints, scope: Any, receive: Any, send: Any) -> None:
        body, answer = await _body(receive), bytearray()

        async def sent(message: Any) -> None:
            answer.extend(message.get("body", b""))
            await send(message)

        await ENDPOINTS(endpoints, scope, _first(body, receive), sent)
        if found := traffic.record(scope, body["body"], bytes(answer), SAID):
            exchanges.append(found)

    return front


def gateway(answers: Answers) -> Front:
    """A gateway with a scripted model, whose tokens come one by one; the machine is that of the endpoints."""
    policy, answer = _Policy(), counted(answers)
    config = GatewayConfig(port=0)
    served = ServedModel(policy, policy.chat, name=MODEL, context_tokens=CONTEXT_TOKENS, config=config)
    app = create_app([served], config=config)
    readers = {dialect.path: dialect.read for dialect in DIALECTS.values()}

    async def front(endpoints: RolloutEndpoints, scope: Any, receive: Any, send: Any) -> None:
        path = re.sub(r"^/r/.*?(?=/v1/)", "", scope["path"])
        if not path.startswith("/v1/"):
            await ENDPOINTS(endpoints, scope, receive, send)
            return
        body = await _body(receive)
        if (read := readers.get(path)) is not None:
            request = read(body["body"])
            last = str(request.messages[-1].get("content", ""))
            policy.answer = answer(last, policy.chat.signatures(list(request.tools)))
        local = [(b"host", b"localhost") if name == b"host" else (name, value) for name, value in scope["headers"]]
        inner = {**scope, "path": path, "raw_path": path.encode(), "headers": local}
        await app(inner, _first(body, receive), send)

    return front


class _Policy:
    """Answers with `answer`, in a stream of single tokens."""

    def __init__(self) -> None:
        self.chat, self.answer = qwen(), ""

    async def complete(self, request: CompletionRequest) -> Completion:
        return scripted_completion(request, self.chat, self.answer, max_tokens=request.sampling.max_tokens)

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[list[int] | Completion]:
        completion = await self.complete(request)
        for token in completion.token_ids.tolist():
            yield [token]
        yield completion


async def _body(receive: Any) -> dict[str, Any]:
    """The messages of a request's body as one."""
    parts, more = bytearray(), True
    while more:
        message = await receive()
        parts.extend(message.get("body", b""))
        more = message.get("more_body", False)
    return {"type": "http.request", "body": bytes(parts), "more_body": False}


def _first(body: Mapping[str, Any], receive: Any) -> Any:
    """A receiver that gives `body` before what `receive` gives."""
    left = [body]

    async def received() -> Any:
        return left.pop() if left else await receive()

    return received


def main() -> None:
    names = sys.argv[1:] or list(AGENTS)
    os.chdir(FOLDER)
    for name in names:
        exchanges = list[traffic.Exchange]()
        played = play(config_of(name), ANSWERS[name], front=recorder(exchanges))
        print(traffic.write(name, exchanges), played.ending, played.fixed, played.statuses)


if __name__ == "__main__":
    main()
