"""The product as a web page: a person asks for an edit, the agent answers through the gateway, the person decides.

    PYTHONPATH=. python -m examples.product.app --url http://127.0.0.1:8000/v1 --model product [--port 8090]

The page sends signals with clients/javascript/etude-feedback.mjs. They go through this server, which has the key and
names the user, so the page can speak for nobody else. What the model says is shown as text."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import httpx
import openai
from examples.product.agent import DEADLINE_S, Agent
from examples.product.edits import Answer, edited, prompt_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from etude.http_server import bind, run_http_server

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "clients" / "javascript" / "etude-feedback.mjs"
MAX_CHARS, MAX_BYTES = 2_000, 16_384
USER = "product_user"
"""The cookie that names a user: a random word, given at the first visit."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Page:
    """The server of the page, in front of an agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._http = httpx.AsyncClient(timeout=DEADLINE_S)
        self.app = Starlette(
            routes=[
                Route("/", self.index),
                Route("/page.mjs", self.file(HERE / "page.mjs", "text/javascript")),
                Route("/page.css", self.file(HERE / "page.css", "text/css")),
                Route("/etude-feedback.mjs", self.file(CLIENT, "text/javascript")),
                Route("/edit", self.edit, methods=["POST"]),
                Route("/signals/feedback", self.signal, methods=["POST"]),
            ]
        )

    async def close(self) -> None:
        """Close the connections to the gateway."""
        await self._http.aclose()

    async def index(self, request: Request) -> Response:
        """Return the page. A new visitor gets a name."""
        response = FileResponse(HERE / "page.html", media_type="text/html", headers=HEADERS)
        if USER not in request.cookies:
            response.set_cookie(USER, secrets.token_hex(8), httponly=True, samesite="strict", max_age=365 * 86_400)
        return response

    def file(self, path: Path, kind: str) -> Any:
        """Return a handler of GET requests that answers with a file."""

        async def answer(_: Request) -> Response:
            return FileResponse(path, media_type=kind, headers=HEADERS)

        return answer

    async def edit(self, request: Request) -> Response:
        """Ask the agent for an edit. Request: {wish, path, file}. Response: {id, kind, text, file}: the id for signals,
        what the agent did, what it said, and the file after it."""
        given = await _json(request)
        if given is None:
            return _refused(400, "send wish, path and file as texts", f"each with at most {MAX_CHARS} characters")
        text = prompt_of(given["wish"], given["path"], given["file"])
        try:
            answer, response_id = await self._agent.ask(text, _user(request))
        except openai.BadRequestError as error:  # such as a text that is longer than the model's context
            return _refused(400, "the model cannot take this request", str(error)[:200])
        except openai.OpenAIError as error:
            return _refused(502, "the agent did not answer", str(error)[:200])
        return JSONResponse(
            {
                "id": response_id,
                "kind": answer.kind,
                "text": answer.text,
                "file": edited(given["file"], answer) if _is_of(answer, given["path"]) else given["file"],
            }
        )

    async def signal(self, request: Request) -> Response:
        """Pass signals on to the gateway, with the key and the name of the user."""
        body = await _body(request)
        if body is None:
            return _refused(413, "the signals are too long", f"at most {MAX_BYTES} bytes")
        headers = {"authorization": f"Bearer {self._agent.key}", "x-etude-user": _user(request)}
        headers["content-type"] = "application/json"
        try:
            found = await self._http.post(f"{self._agent.url.rstrip('/')}/feedback", content=body, headers=headers)
        except httpx.HTTPError as error:
            return _refused(503, "the gateway did not answer", str(error)[:200])
        return Response(found.content, found.status_code, media_type="application/json")


def _is_of(answer: Answer, path: str) -> bool:
    return answer.path == path


def _user(request: Request) -> str:
    """Return the name of the user: its cookie, or that of all who send none."""
    name = request.cookies.get(USER, "")
    return name if name.isalnum() and name.isascii() and len(name) <= 64 else "nobody"


async def _body(request: Request) -> bytes | None:
    """Return the body of a request; None if it is longer than `MAX_BYTES`."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > MAX_BYTES:
            return None
    return bytes(found)


async def _json(request: Request) -> dict[str, str] | None:
    """Return wish, path and file of a request; None if one is missing, empty, too long or not valid text."""
    body = await _body(request)
    try:
        given = json.loads(body or b"")
        found = {name: given[name] for name in ("wish", "path", "file")}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if all(map(_is_text, found.values())) else None


def _is_text(value: object) -> bool:
    """Return whether a value is a text of 1 to `MAX_CHARS` characters without half a surrogate pair.

    JSON may have such halves, which UTF-8 cannot encode."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARS:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _refused(status: int, what: str, facts: str) -> Response:
    return JSONResponse({"error": {"message": f"{what}: {facts}"}}, status)


async def serve(url: str, model: str, *, key: str, host: str, port: int) -> None:
    """Serve the page until cancelled."""
    async with Agent(url, model, key=key) as agent:
        page = Page(agent)
        try:
            async with run_http_server(page.app, bind(host, port), name="the product") as at:
                print(f"the product is at {at}", flush=True)
                await asyncio.Event().wait()
        finally:
            await page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True, help="the gateway: what etude serve prints")
    parser.add_argument("--model", required=True, help="the name of the run that is served")
    parser.add_argument("--key", default="none", help="the API key of the gateway")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090)
    args = parser.parse_args()
    try:
        asyncio.run(serve(args.url, args.model, key=args.key, host=args.host, port=args.port))
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
