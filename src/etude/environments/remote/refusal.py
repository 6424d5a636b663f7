"""What a server of machines refuses with: E2B's error shape, and our hint beside it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.errors import EtudeError, MachineError


class Refused(Exception):
    """An answer that is an error: what, the facts, what to do.

    >>> Refused(404, "no machine i7", hint="it has ended").fields()
    {'code': 404, 'message': 'no machine i7', 'hint': 'it has ended'}
    """

    def __init__(
        self, status: int, what: str, facts: str = "", *, hint: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.what, self.facts, self.hint = status, what, facts, hint
        self.headers = headers or {}
        super().__init__(what)

    def fields(self) -> dict[str, Any]:
        """As plain data."""
        message = f"{self.what}: {self.facts}" if self.facts else self.what
        return {"code": self.status, "message": message, "hint": self.hint}

    def response(self) -> Response:
        """As an answer. Whether to try again is always said: E2B's clients would, at some statuses, by themselves."""
        headers = {"should-retry": "false"} | self.headers
        return JSONResponse(self.fields(), status_code=self.status, headers=headers)


def gone(box_id: str) -> Response:
    """What a proxy of E2B's answers for a machine that is not there: clients look for these words."""
    message = "The sandbox was not found"
    fields = {"code": 502, "message": message, "sandboxId": box_id[:40], "hint": "it has ended: make another"}
    return JSONResponse(fields, status_code=502, headers={"should-retry": "false"})


def of_error(error: EtudeError) -> Refused:
    """An error of ours: the machines' are 503, since another server, or a later time, may do."""
    status = 503 if isinstance(error, MachineError) else 500
    return Refused(status, error.what, error.facts, hint=error.hint)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return of_error(error).response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path} is not offered"
    return Refused(status, what, hint="see the guide on remote machines for what of E2B's API is").response()


async def _broken(request: Request, error: Exception) -> Response:
    return Refused(500, "the server failed", hint="its log says why").response()


HANDLERS: Any = {Refused: _refused, EtudeError: _failed, Exception: _broken, 404: _no_route, 405: _no_route}
