"""Turn commit messages into instructions, without references to the original change.

Removed: commit hashes, URLs, numbers of issues and pull requests, trailers, and lines that only give the origin of the
change. Names of source files are kept, since they describe the change and do not reveal the answer.
"""

from __future__ import annotations

import re

MIN_WORDS = 3
MAX_CHARS = 4_000
MAX_READ_CHARS = 64_000
_TRAILER = re.compile(r"^[A-Z][A-Za-z]+(-[A-Za-z]+)*: ?\S.*$")
_TRAILERS = re.compile(
    r"^(signed-off-by|co-authored-by|reviewed-by|acked-by|tested-by|reported-by|cc|change-id|fixes|closes|refs?|link|"
    r"see also|cherry[- ]picked|\(cherry picked|git-svn-id|bug|issue|pr)\b.*$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"\(?\bhttps?://\S+")
_NUMBER_IN_BRACKETS = re.compile(r"\((?:[a-z]+ )?(?:#|gh-|bpo-)\d+\)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\w)(?:#|gh-|bpo-)\d+\b", re.IGNORECASE)
_HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def instruction_from(message: str) -> str | None:
    """Turn a commit message into an instruction; return None if it is too short.

    >>> instruction_from("Fix rounding of halves (#12)\\n\\nAs 3fa9b21c did.\\n\\nSigned-off-by: A <a@b.c>")
    'Fix rounding of halves\\n\\nAs did.'
    >>> instruction_from("wip") is None
    True
    """
    lines = [line.rstrip() for line in message.strip()[:MAX_READ_CHARS].splitlines()]
    trailers = _trailers(lines)
    kept = [
        line for at, line in enumerate(lines) if not _TRAILERS.match(line.strip()) and (at == 0 or line not in trailers)
    ]
    text = "\n".join(kept)
    for pattern in (_ADDRESS, _NUMBER_IN_BRACKETS, _NUMBER, _HASH):
        text = pattern.sub("", text)
    text = re.sub(r"[ \t]{2,}", " ", text)
    text = re.sub(r" +([.,;:)])", r"\1", text)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.strip() for line in text.splitlines())).strip()
    return text[:MAX_CHARS] if len(re.findall(r"[A-Za-z]{2,}", text)) >= MIN_WORDS else None


def of_merge(message: str) -> str:
    """Return the message of a merge commit without its first line "Merge ...".

    >>> of_merge("Merge pull request #12 from a/b\\n\\nRound halves up")
    'Round halves up'
    """
    subject, _, rest = message.strip().partition("\n")
    return rest.strip() if re.match(r"merged?\b", subject, re.IGNORECASE) else message


def _trailers(lines: list[str]) -> set[str]:
    """The lines after the last empty line, if all of them have the form of trailers."""
    if "" not in lines:
        return set()
    last = lines[len(lines) - lines[::-1].index("") :]
    return set(last) if all(_TRAILER.match(one) for one in last) else set()
