"""A program for machines: find pieces of text, given by their hashes, in installed libraries and in Git objects.

stdin: {"nonce", "pieces": [piece, ...], "lines", "chars"}; stdout: one line, the nonce and {place: [piece, ...]}.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Container, Iterator

MAX_FILE_BYTES = 2 << 20
MAX_PLACES = 500
SUFFIXES = (".py", ".pyi", ".patch", ".diff", ".txt", ".md", ".js", ".ts", ".c", ".h", ".rs", ".go", ".java", ".sh")
PLACES = ["/usr/lib/python3", "/usr/local/lib", "/opt", "/home", "/root", "/srv", "/tmp", "/var/tmp", "/var/cache"]


def pieces(text: str, lines: int, chars: int, lengths: Container[int] | None = None) -> Iterator[str]:
    """Yield "length hash" for every run of `lines` lines that has at least `chars` characters.

    Differences in spacing and blank lines are ignored. With `lengths`, only pieces with one of these lengths are
    hashed, which saves time."""
    rows = [" ".join(row.split()) for row in text.splitlines()]
    rows = [row for row in rows if row]
    for at in range(len(rows) - lines + 1):
        piece = "\n".join(rows[at : at + lines])
        if len(piece) >= chars and (lengths is None or len(piece) in lengths):
            yield f"{len(piece)} {hashlib.sha256(piece.encode('utf-8', 'replace')).hexdigest()[:16]}"


def roots() -> list[str]:
    """Return the folders to scan."""
    found = [*sys.path, *sysconfig.get_paths().values(), *PLACES]
    return sorted({os.path.realpath(p) for p in found if os.path.isdir(p)} - {os.getcwd()})


def files() -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every text file of the machine outside its working directory."""
    seen = {os.getcwd()}
    for root in roots():
        for folder, below, names in os.walk(root):
            if folder in seen:
                below[:] = []
                continue
            seen.add(folder)
            for name in names:
                if name.endswith(SUFFIXES):
                    path = os.path.join(folder, name)
                    try:
                        if os.path.getsize(path) <= MAX_FILE_BYTES:
                            with open(path, "rb") as file:
                                yield path, file.read()
                    except OSError:
                        continue


def objects() -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of every blob in the git repository of the working directory, reachable or not."""
    if not os.path.exists(".git"):
        return
    listing = ["git", "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectsize) %(objectname)"]
    for row in subprocess.run(listing, stdout=subprocess.PIPE, check=False).stdout.decode().splitlines():
        kind, size, name = row.split()
        if kind == "blob" and int(size) <= MAX_FILE_BYTES:
            blob = subprocess.run(["git", "cat-file", "blob", name], stdout=subprocess.PIPE, check=False)
            yield f"git object {name}", blob.stdout


def main() -> None:
    request = json.load(sys.stdin)
    wanted: set[str] = set(request["pieces"])
    lengths = {int(piece.partition(" ")[0]) for piece in wanted}
    found: dict[str, list[str]] = {}
    for source in (objects(), files()):
        for place, data in source:
            if b"\0" in data[:1024] or len(found) >= MAX_PLACES:
                continue
            text = data.decode("utf-8", "replace")
            got = wanted & set(pieces(text, request["lines"], request["chars"], lengths))
            if got:
                found[place] = sorted(got)
    print(f"\n{request['nonce']} {json.dumps(found)}")


if __name__ == "__main__":
    main()
