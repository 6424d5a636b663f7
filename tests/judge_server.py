"""A judge behind HTTP whose truth, bias, error rate and failures are known, in the dialects of OpenAI and Anthropic.

The quality of a work is in its text: each line ``fact`` is one point, from 1 to 5. The server reads the works of a
question from the lines of its fences, as a model would, and answers in the form that the question asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from etude.rewards.judges.asking import Reply
from etude.rewards.judges.questions import Question
from etude.rewards.judges.verdicts import Form

LOW, HIGH = 1, 5
SIGNATURE = "signed: the tiny model"
Bias = Callable[[str, random.Random], int]
"""Returns the score of a work's text."""


def work(facts: int, *, filler: int = 0, signed: bool = False, more: str = "") -> str:
    """A text of quality `facts` (1 to 5), with `filler` further words."""
    lines = ["fact"] * facts + ["and " * filler] * bool(filler) + [SIGNATURE] * signed + [more] * bool(more)
    return "\n".join(lines)


def truth(text: str, draw: random.Random | None = None) -> int:
    """The true score of a work."""
    return min(HIGH, max(LOW, sum(line.strip() == "fact" for line in text.splitlines())))


def honest(error: float = 0.0) -> Bias:
    """The truth; with this probability one point beside it."""

    def score(text: str, draw: random.Random) -> int:
        found = truth(text)
        return min(HIGH, max(LOW, found + draw.choice((-1, 1)))) if draw.random() < error else found

    return score


def longer(error: float = 0.0) -> Bias:
    """Longer is better, whatever it says."""
    return lambda text, draw: min(HIGH, LOW + len(text.split()) // 20)


def praises_itself(error: float = 0.0) -> Bias:
    """The truth, and two points more for what it signed."""
    plain = honest(error)
    return lambda text, draw: min(HIGH, plain(text, draw) + 2 * (SIGNATURE in text))


def partly_random(share: float, error: float = 0.0) -> Bias:
    """The truth; for a share of the works any score."""
    plain = honest(error)
    return lambda text, draw: draw.randint(LOW, HIGH) if draw.random() < share else plain(text, draw)


@dataclass
class ScriptedJudge:
    """The server. `fault` is asked before each answer, with the number of the request, for what goes wrong.

    It gives None; a status, or (status, Retry-After); "hang", "close"; or a text that is sent as the model's reply.
    `prefers_first`: the probability that the first of two or more works wins, whatever it is. `tokens`: the
    probabilities of the first tokens of a reply, where a request wants them; None: it gives none."""

    bias: Bias = field(default_factory=honest)
    seed: int = 0
    model: str = "scripted-1"
    fault: Callable[[int], Any] = lambda _: None
    prefers_first: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    usage: bool = True
    tokens: Callable[[str], dict[str, float] | None] = lambda said: {said: 0.9, "The": 0.05}
    running: int = 0
    most_running: int = 0

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[ScriptedJudge]:
        """Serve on loopback while the block runs; `url` is the base of both dialects, without ``/v1``."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._openai)
        app.router.add_post("/v1/messages", self._anthropic)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _openai(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = "\n".join(message["content"] for message in body["messages"])
        said = await self._said(request, body, prompt)
        if isinstance(said, web.StreamResponse):
            return said
        used = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(said) // 4}
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        if body.get("logprobs") and (shares := self.tokens(said)) is not None:
            top = [{"token": text, "logprob": math.log(share)} for text, share in shares.items()]
            choice |= {"logprobs": {"content": [{**top[0], "top_logprobs": top}]}, "finish_reason": "length"}
        found = {"id": "c", "object": "chat.completion", "created": 1, "model": self.model, "choices": [choice]}
        return web.json_response(found | ({"usage": used} if self.usage else {}))

    async def _anthropic(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["system"] + "\n" + body["messages"][0]["content"]
        said = await self._said(request, body, prompt)
        if isinstance(said, web.StreamResponse):
            return said
        found = {"id": "m", "type": "message", "role": "assistant", "model": self.model, "stop_reason": "end_turn"}
        used = {"input_tokens": len(prompt) // 4, "output_tokens": len(said) // 4}
        return web.json_response(found | {"content": [{"type": "text", "text": said}], "usage": used})

    async def _said(self, request: web.Request, body: dict[str, Any], prompt: str) -> str | web.StreamResponse:
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            fault = self.fault(len(self.bodies))
            await asyncio.sleep(0)
            if fault == "hang":
                await asyncio.sleep(3600)
            if fault == "close":
                assert request.transport is not None
                request.transport.close()
            if isinstance(fault, int):
                fault = (fault, None)
            if isinstance(fault, tuple):
                headers = {} if fault[1] is None else {"Retry-After": str(fault[1])}
                return web.json_response({"error": {"message": "planned"}}, status=fault[0], headers=headers)
            return fault if isinstance(fault, str) else self.answer(prompt)
        finally:
            self.running -= 1

    def answer(self, prompt: str) -> str:
        """The reply of an undisturbed judge to a whole prompt."""
        texts = works_of(prompt)
        draw = random.Random(f"{self.seed} {texts}")
        scores = [self.bias(text, draw) for text in texts]
        first = draw.random() < self.prefers_first
        if "Which work is better?" in prompt:
            verdict: Any = "first" if first or scores[0] > scores[1] else "second" if scores[1] > scores[0] else "tie"
        elif "Put the works in order" in prompt:
            order = range(len(texts)) if first else sorted(range(len(texts)), key=lambda i: -scores[i])
            verdict = [i + 1 for i in order]
        else:
            [verdict] = scores
        if code := re.search(r'code \(the text "(\w+)"\)', prompt):
            return json.dumps({"reason": "as scripted", "verdict": verdict, "code": code[1]})
        words = ", ".join(map(str, verdict)) if isinstance(verdict, list) else str(verdict)
        if code := re.search(r"^VERDICT (\w+): VALUE$", prompt, re.MULTILINE):
            return f"As scripted.\nVERDICT {code[1]}: {words}"
        return words


@dataclass
class SlowAsker:
    """Asks a scripted judge in this process. An answer takes `latency_s` seconds of the loop's clock (`tests.clock`).

    `hangs` is given the number of a question, from 1, and returns whether it is never answered."""

    latency_s: float
    hangs: Callable[[int], bool] = lambda _: False
    num_asked: int = 0
    identity: tuple[str, ...] = ("scripted",)

    def max_output(self, form: Form) -> int:
        return 100

    async def ask(self, question: Question) -> Reply:
        self.num_asked += 1
        await asyncio.sleep(1e9 if self.hangs(self.num_asked) else self.latency_s)
        return Reply(ScriptedJudge().answer(f"{question.system}\n{question.user}"), "scripted-1")


def works_of(prompt: str) -> list[str]:
    """The text of each work in a prompt: what is fenced, after the line that announces the work, if there is one."""
    pieces = re.split(r"^(?:The|Work) [\w ]+, as data with the code \w+:$", prompt, flags=re.M)
    shown = pieces[1:] or pieces
    return ["\n".join(line[2:] for line in piece.splitlines() if line.startswith("| ")) for piece in shown]


def qualities(draw: random.Random, count: int) -> Sequence[int]:
    """Qualities of some works, of all levels."""
    return [draw.randint(LOW, HIGH) for _ in range(count)]


def judge_in_a_thread(*, most_s: float = 300.0) -> Iterator[ScriptedJudge]:
    """A judge that is served in a thread of its own, for at most `most_s` seconds."""
    server, ready, ended = ScriptedJudge(), threading.Event(), threading.Event()

    async def serve() -> None:
        async with server.serve():
            ready.set()
            await asyncio.to_thread(ended.wait, most_s)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(30.0)
    yield server
    ended.set()
    thread.join(30.0)
