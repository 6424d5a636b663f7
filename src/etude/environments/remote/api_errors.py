"""Errors of the server in the JSON format of E2B's API, with an additional `hint`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.errors import EtudeError, MachineError


class ApiError(Exception):
    """An error that a handler raises and the server sends as its HTTP response.

    `status` is the HTTP status, `what` says what happened, `facts` gives the numbers or names, `hint` says what to do.
    `headers` are added to the response.

    >>> ApiError(404, "no sandbox i7", hint="it has ended").fields()
    {'code': 404, 'message': 'no sandbox i7', 'hint': 'it has ended'}
    """

    def __init__(
        self, status: int, what: str, facts: str = "", *, hint: str, headers: dict[str, str] | None = None
    ) -> None:
        self.status, self.what, self.facts, self.hint = status, what, facts, hint
        self.headers = headers or {}
        super().__init__(what)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the JSON body."""
        message = f"{self.what}: {self.facts}" if self.facts else self.what
        return {"code": self.status, "message": message, "hint": self.hint}

    def response(self) -> Response:
        """Build the HTTP response.

        The header `should-retry` is "false" unless `headers` say otherwise: E2B's clients would retry some statuses."""
        headers = {"should-retry": "false"} | self.headers
        return JSONResponse(self.fields(), status_code=self.status, headers=headers)


def sandbox_gone(sandbox_id: str) -> Response:
    """Build the 502 response for a sandbox that does not exist or has ended.

    E2B's own proxy sends the same. Clients recognize the sandbox's end by the message."""
    message = "The sandbox was not found"
    fields = {"code": 502, "message": message, "sandboxId": sandbox_id[:40], "hint": "it has ended: create another one"}
    return JSONResponse(fields, status_code=502, headers={"should-retry": "false"})


def api_error_of(error: EtudeError) -> ApiError:
    """Convert an `EtudeError` to an `ApiError`: status 503 for `MachineError`, else 500.

    503 tells the client that a retry or another server can succeed."""
    status = 503 if isinstance(error, MachineError) else 500
    return ApiError(status, error.what, error.facts, hint=error.hint)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return api_error_of(error).response()


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path} is not supported"
    return ApiError(
        status, what, hint="see the guide on remote machines for the supported part of E2B's API"
    ).response()


async def _broken(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed", hint="see the log of the server").response()


HANDLERS: Any = {ApiError: _refused, EtudeError: _failed, Exception: _broken, 404: _no_route, 405: _no_route}
