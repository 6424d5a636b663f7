"""Finds secrets in texts: private keys, tokens of known services, passwords in URLs, headers and assignments.

Tokens of services have a fixed prefix, so a match is almost certainly one. The patterns begin with a fixed text where
they can: `re` then searches at the speed of `str.find`. An assigned value is a secret if it looks random: at least 3.2
bits per character, with letters and digits. Without quotes, as in .env, YAML and .netrc files, it must not look like a
name, such as "token_2" or "sha256.digest". Placeholders such as "AKIAIOSFODNN7EXAMPLE" are none.

`detect-secrets` was weighed: it reads files line by line with some 25 detectors, needs requests and PyYAML, and its
detectors of random strings report hashes in code as secrets."""

from __future__ import annotations

import binascii
import math
import re
from collections import Counter
from collections.abc import Iterator

REDACTED = "<REDACTED>"
_MIN_BITS = 3.2
_HEADER = r"(?i:authorization)[\"']?\s{0,4}[:=,]\s{0,4}f?[\"']?"
_PATTERNS = (  # (kind, texts of which one is in every match, pattern; its group "value" is the secret, or all of it)
    (
        "private-key",
        ("PRIVATE KEY",),
        r"-----BEGIN (?:[A-Z]+ )?(?:ENCRYPTED )?PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----)){20,10000}"
        r"(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    ("aws-key-id", ("AKIA", "ASIA"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    (
        "aws-secret",
        ("SECRET", "secret", "Secret"),
        r"(?i:aws)[\w.-]{0,20}(?i:secret)[\w.-]{0,20}[\"']?\s{0,4}[:=]\s{0,4}[\"']?"
        r"(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    (
        "azure-key",
        ("Key=",),
        r"\b(?:Account|SharedAccess)Key=(?P<value>[A-Za-z0-9+/]{86}==|[A-Za-z0-9+/]{43}=)",
    ),
    ("telegram-token", (":AA",), r":AA(?<=[0-9]{8}:AA)[A-Za-z0-9_-]{32,33}(?![A-Za-z0-9_-])"),
    ("twilio-key", ("SK",), r"SK(?<=\bSK)[0-9a-f]{32}\b"),
    ("digitalocean-token", ("_v1_",), r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    ("github-token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"\bgh[pousr]_[A-Za-z0-9]{36,255}\b"),
    ("github-token", ("github_pat_",), r"\bgithub_pat_[A-Za-z0-9_]{60,255}\b"),
    ("gitlab-token", ("glpat-",), r"\bglpat-[A-Za-z0-9_-]{20,64}"),
    ("slack-token", ("xox",), r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}"),
    ("slack-hook", ("hooks.slack.com",), r"hooks\.slack\.com/services/T[A-Za-z0-9]+/B[A-Za-z0-9]+/[A-Za-z0-9]{20,}"),
    ("google-key", ("AIza",), r"\bAIza[0-9A-Za-z_-]{35}"),
    ("stripe-key", ("k_live_",), r"\b[srp]k_live_[0-9A-Za-z]{20,250}"),
    (
        "openai-key",
        ("sk-",),
        r"sk-(?<=\bsk-)(?:proj-|svcacct-|ant-[a-z0-9]+-)?(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,250}",
    ),
    ("huggingface-token", ("hf_",), r"\bhf_[A-Za-z]{30,50}\b"),
    ("npm-token", ("npm_",), r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("pypi-token", ("pypi-AgEI",), r"\bpypi-AgEI[A-Za-z0-9_-]{50,500}"),
    ("sendgrid-key", ("SG.",), r"\bSG\.[A-Za-z0-9_-]{20,24}\.[A-Za-z0-9_-]{39,50}"),
    (
        "secret-key",  # of Django and Flask: it may have any symbols, so it is not found as an assigned secret
        ("SECRET_KEY", "secret_key"),
        r"(?:SECRET_KEY|secret_key)[\"']?(?:\]?\s{0,4}[:=]|,\s{0,4}(?:default\s?=)?)\s{0,4}[rb]?"
        r"(?P<quote>[\"'])(?P<value>[^\s\"'\\]{32,128})(?P=quote)",
    ),
    ("jwt", ("eyJ",), r"\beyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{20,1000}"),
    (
        "password-in-url",
        ("://",),
        r"://(?<=[a-z0-9+.-]://)[^\s/:@'\"<>{}$]{0,64}:(?P<value>[^\s/:@'\"<>{}$]{5,128})@",
    ),
    (
        "authorization",
        ("uthorization", "UTHORIZATION"),
        rf"{_HEADER}(?i:bearer|token)\s{{1,4}}(?P<value>[A-Za-z0-9+/._~=-]{{12,2000}})(?![\w{{(%])",
    ),
    (
        "basic-authorization",
        ("uthorization", "UTHORIZATION"),
        rf"{_HEADER}(?i:basic)\s{{1,4}}(?P<value>[A-Za-z0-9+/]{{8,2000}}={{0,2}})",
    ),
    (
        "netrc-password",
        ("machine",),
        r"machine(?<=\bmachine)\s{1,8}\S{1,200}\s{1,8}login\s{1,8}\S{1,200}\s{1,8}password\s{1,8}(?P<value>[^\s{}<>$]{5,200})",
    ),
)
_TEMPLATE = re.compile(r"\$\{|\{\{|\{%|%\(|\$\(|^[<{\[].*[>}\]]\Z")
_ALWAYS = {"private-key", "password-in-url"}
_NAMES = r"(?:passw(?:or)?d|passphrase|secret|token|api_?key|access_?key|auth_?key|private_?key|credential)s?"
_NAME_PARTS = (
    "passw", "passphrase", "secret", "token", "apikey", "api_key", "accesskey", "access_key", "authkey", "auth_key",
    "privatekey", "private_key", "credential", "pwd", "accountkey", "account_key",
)  # fmt: skip
"""How names of secrets begin, in lower case. Patterns of assigned values are matched only there."""
_QUOTED = re.compile(
    rf"(?i:{_NAMES})[\w.-]{{0,40}}[\"']?\]?\s{{0,4}}(?::=|=>|[:=])\s{{0,4}}[\"'](?P<value>[^\s\"'<>{{}}$%()]{{12,256}})[\"']"
)
_BARE = re.compile(
    rf"(?i:{_NAMES}|pwd|secret_?key|account_?key)[ \t]{{0,4}}[:=][ \t]{{0,4}}(?P<value>(?=[^\s0-9]{{0,255}}[0-9])"
    r"[^\s\"'`<>{}()\[\],;$=][^\s\"'`<>{}()\[\],;]{7,255})(?!\S)"
)
_QUERY = re.compile(rf"(?i:{_NAMES})=(?P<value>[A-Za-z0-9_.~%+/-]{{16,256}})(?![\w${{<(\[])")
_BEFORE_QUERY = re.compile(r"[?&][\w-]{0,40}\Z")
_BEFORE_BARE = re.compile(r"(?:^|\s)[\w.-]{0,60}\Z")
_NAME = re.compile(r"(?:[A-Za-z]*\d{0,3}|v?\d+|0x[0-9a-fA-F]+)(?:[-_.:/@](?:[A-Za-z]*\d{0,3}|v?\d+))*")
"""A value that is a name, a version, a path or a number: its digits are at the ends of its words."""
_BEFORE_CHARS = 62  # before a name: at most 61 that `_BEFORE_BARE` matches, and one more
_COMPILED = tuple((kind, anchors, re.compile(pattern)) for kind, anchors, pattern in _PATTERNS)
_PLACEHOLDER = re.compile(
    r"(?i)example|placeholder|changeme|dummy|redacted|your[_-]|xxxx|\*\*\*|\.\.\.|0123456789|1234567890|^(?:password|passwd|"
    r"secret|username|hunter2|admin|guest|postgres|passw|pass\d|QWxhZGRpbjpvcGVuIHNlc2FtZQ==)$|^Eby8vdM02xNOcqFlqUwJPLlm"
)


def find_secrets(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, start, stop) of each secret in a text; those of one kind in order.

    >>> [kind for kind, _, _ in find_secrets('key = "AKIA2E0A8F3B244C9986"; url = "https://bob:Ahr7tu2x@host/x"')]
    ['aws-key-id', 'password-in-url']
    >>> list(find_secrets('password = "correct"; token = "AKIAIOSFODNN7EXAMPLE"'))
    []
    """
    for kind, anchors, pattern in _COMPILED:
        if any(anchor in text for anchor in anchors):
            group: str | int = "value" if "value" in pattern.groupindex else 0
            for match in pattern.finditer(text):
                if _is_secret(kind, match[group]):
                    yield kind, *match.span(group)
    yield from _assigned(text)


def _assigned(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, start, stop) of each secret that is assigned to a name: quoted, unquoted, or in a URL's query."""
    found, in_urls = set[tuple[int, int]](), set[tuple[int, int]]()
    for at in _names(text):
        quoted, bare = _QUOTED.match(text, at), _BARE.match(text, at)
        if quoted is not None and _is_random(quoted["value"]):
            found.add(quoted.span("value"))
        if bare is not None and _is_bare_secret(bare["value"]):
            first = max(0, at - _BEFORE_CHARS)
            before = _BEFORE_BARE.search(text[first:at])
            if before is not None and (before.start() or not first):
                found.add(bare.span("value"))
        query = _QUERY.match(text, at)
        in_query = query is not None and _BEFORE_QUERY.search(text[max(0, at - _BEFORE_CHARS) : at])
        if query is not None and in_query and _is_random(query["value"]) and not _NAME.fullmatch(query["value"]):
            in_urls.add(query.span("value"))
    for kind, spans in (("assigned-secret", found), ("secret-in-url", in_urls - found)):
        for start, stop in sorted(spans):
            yield kind, start, stop


def _names(text: str) -> Iterator[int]:
    """Yield the places in a text where a name of secrets may begin, for one name after another."""
    lower = text.lower()
    if len(lower) != len(text):  # "İ" has two characters in lower case
        lower = "".join(char if len(char.lower()) > 1 else char.lower() for char in text)
    for part in _NAME_PARTS:
        at = lower.find(part)
        while at >= 0:
            yield at
            at = lower.find(part, at + 1)


def _is_secret(kind: str, value: str) -> bool:
    """Return whether what a pattern found is a secret and no placeholder."""
    if _PLACEHOLDER.search(value):
        return False
    if kind == "basic-authorization":
        try:
            _, _, password = binascii.a2b_base64(value).decode("latin-1").partition(":")
        except binascii.Error:
            return False
        return bool(password) and not _PLACEHOLDER.search(password)
    if kind in ("authorization", "netrc-password"):
        return not _NAME.fullmatch(value)
    if kind == "secret-key":
        return _is_mixed(value) and _bits(value) >= _MIN_BITS and not _TEMPLATE.search(value)
    return kind in _ALWAYS or _bits(value) > 2.5


def _is_random(value: str) -> bool:
    """Return whether a value in quotes or in a query looks random, and so is a secret."""
    return _is_mixed(value) and _bits(value) >= _MIN_BITS and not _PLACEHOLDER.search(value)


def _is_bare_secret(value: str) -> bool:
    """Return whether a value without quotes is a secret. It could also be a name, a path or an expression."""
    if value[0] in "./~" or "://" in value or not _is_mixed(value) or _NAME.fullmatch(value):
        return False
    return _bits(value) > 2.5 and not _PLACEHOLDER.search(value)


def _is_mixed(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def redact(text: str, found: list[tuple[str, int, int]]) -> str:
    """Return a text with each secret that `find_secrets` found in it replaced by `REDACTED`."""
    parts, at = list[str](), 0
    for _, start, stop in sorted(found, key=lambda one: one[1:]):
        if start >= at:
            parts += [text[at:start], REDACTED]
        at = max(at, stop)
    return "".join([*parts, text[at:]])


def _bits(value: str) -> float:
    """Entropy per character of a string in bits, from its own frequencies."""
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())
