"""Parse the files of a multipart form (RFC 7578) from its complete body. File names keep their folders."""

from __future__ import annotations

import re

from etude.environments.remote.api_errors import ApiError

_MAX_PARTS = 4096
_BORDER = re.compile(r'(?i);\s*boundary=(?:"([^"]{1,200})"|([^;\s"]{1,200}))')
_DISPOSITION = re.compile(rb"(?im)^content-disposition:[ \t]*form-data([^\r\n]*)")
_NAMES = re.compile(rb'(?i);[ \t]*(name|filename)="((?:[^"\\]|\\.)*)"')


def parts(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the (name, content) of each file in a multipart form.

    `kind` is the form's content type, with its boundary. Parts that are not files are ignored. Raises `ApiError` (400)
    if the form cannot be parsed or has no file.

    >>> head = b'--B\\r\\nContent-Disposition: form-data; name="file"; filename="/a/b.txt"\\r\\n\\r\\n'
    >>> parts("multipart/form-data; boundary=B", head + b"hi\\r\\n--B--\\r\\n")
    [('/a/b.txt', b'hi')]
    """
    border = _BORDER.search(kind)
    if border is None:
        raise _unreadable("its content type has no boundary")
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + (border[1] or border[2]).encode(), _MAX_PARTS + 2)
    if not pieces or not pieces.pop().startswith(b"--"):
        raise _unreadable(f"its end is missing, or it has more than {_MAX_PARTS} parts")
    found = [file for piece in pieces if (file := _file(piece)) is not None]
    if not found:
        raise ApiError(400, "the form has no file", hint="name the parts `file`, each with a filename")
    return found


def _file(piece: bytes) -> tuple[str, bytes] | None:
    """Parse one part. Returns None if it is not named `file`."""
    head, empty, data = piece.partition(b"\r\n\r\n")
    disposition = _DISPOSITION.search(head)
    if not empty or disposition is None:
        raise _unreadable("a part has no content-disposition, or its header has no end")
    names = {name.lower(): text for name, text in _NAMES.findall(disposition[1])}
    if names.get(b"name") != b"file" or not names.get(b"filename"):
        return None
    try:
        return _plain(names[b"filename"].decode()), data
    except UnicodeDecodeError:
        raise _unreadable("a file name is not UTF-8") from None


def _plain(name: str) -> str:
    """Unquote a file name as browsers and httpx quote it."""
    name = re.sub(r"\\(.)", r"\1", name)
    return name.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


def _unreadable(why: str) -> ApiError:
    return ApiError(400, "the form cannot be read", why, hint="send multipart/form-data")
