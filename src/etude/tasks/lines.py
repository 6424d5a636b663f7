"""Lines of a file that others wrote, plain or gzipped: read whole, to a bound."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from etude.errors import NoSource, TaskError


def lines_of(path: Path, what: str, *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(place, line) of each line that is not blank; `what` they are. `NoSource` where there is no such file,
    `TaskError` for one that cannot be read, or has more than `max_bytes` when it is unpacked."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            data: bytes = file.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        kind = NoSource if isinstance(error, FileNotFoundError) else TaskError
        raise kind(f"cannot read {path}", str(error), hint=f"give {what} as .jsonl or .jsonl.gz") from None
    if len(data) > max_bytes:
        raise TaskError(f"{path} unpacks to more than {max_bytes >> 20} MiB", hint="cut it into several files")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line
