"""Maps the exit code of an agent program, and the status that it may write into a JSON file, to an `Ending`."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from etude.records.exports import is_plain
from etude.records.rollout import Ending

MAX_STATUS_BYTES = 64 << 20
"""The maximum size of a file from which a status is read. Some agents write the whole conversation into it."""


@dataclass(frozen=True, kw_only=True)
class StatusFile:
    """The JSON file, and the field in it, in which a program writes how it ended.

    `file`: a JSON file in its working directory. `field`: the name of the field that has the status, with dots between
    the names of nested objects ("info.exit_status")."""

    file: str
    field: str


def settings_fault(endings: Mapping[str, Ending], status: StatusFile | None) -> str:
    """Return what is wrong in the settings `endings` and `status` of a program, or ""."""
    if status is not None and not is_plain(status.file):
        return f"status.file = {status.file!r} is not a path in the working directory of the program"
    others = [name for name in endings if not (name.isdecimal() and int(name) < 256)]
    if status is None and others:
        return f"endings has {others[0]!r}; without status its names are exit codes, 0 to 255"
    return ""


async def ending_of(
    code: int, endings: Mapping[str, Ending], status: StatusFile | None, read: Callable[[str], Awaitable[bytes]]
) -> tuple[Ending, str]:
    """Return the ending of a program that has ended by itself, and what decided it, such as "exit code 3".

    - `code`: its exit code.
    - `endings`: the ending by exit code ("3") and by status. The exit code is used if the status is missing or
      not named.
    - `status`: where the program writes its status; None: nowhere.
    - `read`: returns a file of the program's working directory. Raises `OSError` or `ValueError`.

    If `endings` names neither, the ending is `stopped`; but without `status`, exit code 0 is a submission."""
    by_code, said = endings.get(str(code)), f"exit code {code}"
    if status is None:
        return by_code or (Ending.STOPPED if code else Ending.SUBMITTED), said
    try:
        text = await asyncio.to_thread(status_in, await read(status.file), status.field)
    except (OSError, ValueError) as error:
        return by_code or Ending.STOPPED, f"{said}, no status: {type(error).__name__}: {error}"[:500]
    if text not in endings and by_code is not None:
        return by_code, said
    return endings.get(text, Ending.STOPPED), f"{status.field} = {json.dumps(text)[:200]}"


def status_in(data: bytes, field: str) -> str:
    """Return the value of a field of a JSON document as text. `field` has dots between the names of nested objects.

    Numbers, booleans and null are returned as JSON writes them. Raises `ValueError` if the bytes are not JSON, or the
    field is missing, an object or a list."""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"it has no {name!r}")
        value = value[name]
    if isinstance(value, dict | list):
        raise ValueError("the field has several values")
    return value if isinstance(value, str) else json.dumps(value)


def read_regular(path: Path) -> bytes:
    """Read a file that a program wrote. Raises `OSError`, and `ValueError` if it is not a regular file, or larger than
    `MAX_STATUS_BYTES`. Links are not followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_STATUS_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_STATUS_BYTES:
        raise ValueError(f"it has more than {MAX_STATUS_BYTES} bytes")
    return data
