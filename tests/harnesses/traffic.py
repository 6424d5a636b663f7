"""What real agents send, as files: writing it, and sending it again.

A file ``recorded/NAME.json`` has the headers and bodies of an agent's requests for completions, in order, and the ids
in what it was answered. `tests.harnesses.fronts` records one. Long texts, such as the prompts of the agent's maker, are
replaced by their length and a digest, so equal texts stay equal. Names, types, schemas, and all that the scripted model
said are as they were sent.

As a program (`python traffic.py FILE`) this is an agent that sends the requests of a file, each after the answer to the
one before, with the ids that the server gave this time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
LONGEST = 60  # characters of a text that stands in a file as it was sent
LIMIT_S = 120.0
_ID = re.compile(r"\b(?:call|toolu|fc|msg|rs|resp|chatcmpl)[_-][A-Za-z0-9]{8,}\b")
_HEADERS = re.compile(r"accept|content-type|user-agent|anthropic-.*|openai-.*|x-stainless-.*|originator|x-app")
_ASKS = re.compile(r"/v1/(chat/completions|responses|messages)$")


@dataclass
class Exchange:
    """A request for a completion, and the ids in the answer to it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    ids: list[str] = field(default_factory=list)


def ids_in(text: str) -> list[str]:
    """The ids of responses, messages and calls in a text, each once, in order."""
    return list(dict.fromkeys(_ID.findall(text)))


def without_texts(body: Any, kept: Iterable[str]) -> Any:
    """The body with placeholders for long texts, except for those in which a text of `kept` stands.

    >>> without_texts({"role": "user", "content": "x" * 99}, ())
    {'role': 'user', 'content': '<99 characters, d0621fdd>'}
    """
    if isinstance(body, dict):
        return {name: without_texts(value, kept) for name, value in body.items()}
    if isinstance(body, list):
        return [without_texts(value, kept) for value in body]
    if not isinstance(body, str) or len(body) <= LONGEST or any(text in body for text in kept):
        return body
    return f"<{len(body)} characters, {hashlib.sha256(body.encode()).hexdigest()[:8]}>"


def record(scope: Mapping[str, Any], body: bytes, answer: bytes, kept: Iterable[str]) -> Exchange | None:
    """The exchange of a request to a rollout's endpoints; None for one that asks for no completion."""
    path = re.sub(r"^/r/.*?(?=/v1/)", "", scope["path"])
    if scope["method"] != "POST" or not _ASKS.search(path):
        return None
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    query = scope["query_string"].decode()
    return Exchange(
        path=f"{path}?{query}" if query else path,
        headers={name: value for name, value in headers.items() if _HEADERS.fullmatch(name)},
        body=without_texts(json.loads(body), kept),
        ids=ids_in(answer.decode()),
    )


def write(name: str, exchanges: Iterable[Exchange]) -> Path:
    """Write the exchanges of an agent; a request has only the fields that differ from those of the one before."""
    written, last = list[dict[str, Any]](), dict[str, Any]()
    for one in exchanges:
        changed = {key: value for key, value in one.body.items() if key not in last or last[key] != value}
        same = [key for key in one.body if key not in changed]
        written.append({"path": one.path, "headers": one.headers, "same": same, "body": changed, "ids": one.ids})
        last = one.body
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{name.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return path


def read(path: Path) -> list[Exchange]:
    """Read the exchanges of an agent."""
    exchanges, last = list[Exchange](), dict[str, Any]()
    for one in json.loads(path.read_text()):
        last = {key: last[key] for key in one["same"]} | one["body"]
        exchanges.append(Exchange(one["path"], one["headers"], last, one["ids"]))
    return exchanges


def send_again(base: str, exchanges: Iterable[Exchange], key: str) -> list[tuple[int, str]]:
    """Send the requests in order, and return the status and the text of each answer."""
    answers, renamed = list[tuple[int, str]](), dict[str, str]()
    for one in exchanges:
        body = _ID.sub(lambda found: renamed.get(found[0], found[0]), json.dumps(one.body))
        headers = {**one.headers, "authorization": f"Bearer {key}", "x-api-key": key}
        request = urllib.request.Request(base + one.path, body.encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        renamed.update(zip(one.ids, ids_in(text), strict=False))
        answers.append((status, text))
    return answers


def main() -> None:
    """Send the requests of a file to the endpoints of a rollout."""
    base, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
    answers = send_again(base, read(Path(sys.argv[1])), key)
    for status, text in answers:
        print(status, text[:2000] if status != 200 else "")
    sys.exit(any(status != 200 for status, _ in answers))


if __name__ == "__main__":
    main()
