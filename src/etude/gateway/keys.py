"""API keys of a gateway, with limits of requests per minute and tokens per day.

The file of keys is TOML, with one table for each key. It has no secrets: a key is given by its SHA-256.

    [alice]
    sha256 = "9f86d081..."       # printf %s "$KEY" | sha256sum
    requests_per_minute = 60     # 0, the default: no limit
    tokens_per_day = 1_000_000   # of prompts, answers and summaries, from 0:00 UTC; 0, the default: no limit

Before a request is sampled, it reserves the tokens that it may use (`KeyUse.reserve`), so concurrent requests cannot
exceed the quota together. What a key has used is counted in memory, from 0 at the start of the gateway. Minutes and
days are measured with a monotonic clock, so a change of the system's time neither prolongs a refusal nor grants a quota
twice."""

from __future__ import annotations

import hashlib
import string
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from etude.config import read
from etude.errors import ConfigError, nearest
from etude.gateway.errors import RequestRefused

_MINUTE_S, _DAY_S = 60.0, 86_400.0


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key as the hexadecimal SHA-256 of its UTF-8 bytes, and its limits; 0 is no limit."""

    sha256: str
    requests_per_minute: int = 0
    tokens_per_day: int = 0


class KeyUse:
    """One API key with its limits, and the requests and tokens that it has used.

    - `num_tokens`: tokens used on the current day. `num_reserved`: tokens that running requests have reserved.
    - `clock`: monotonic time in seconds. `wall`: Unix time in seconds, read at the start and whenever a day ends."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name, self.limits, self._clock, self._wall = name, limits, clock, wall
        self._requests: deque[float] = deque()
        self.num_tokens = self.num_reserved = 0
        self._day_ends = clock() + _DAY_S - wall() % _DAY_S  # by `clock`

    def add_request(self) -> None:
        """Count a request. Raises `RequestRefused` (HTTP status 429), and counts nothing, if a limit of the key is
        reached."""
        now, limits = self._clock(), self.limits
        if limits.tokens_per_day and self._tokens_of_today(now) >= limits.tokens_per_day:
            what = f"the key {self.name!r} has used its {limits.tokens_per_day} tokens of today (UTC)"
            hint = "wait for the next day (retry-after has the seconds), or raise tokens_per_day in the file of keys"
            facts = f"{self.num_tokens} were read and sampled"
            retry_s = self._day_ends - now
            raise RequestRefused(429, what, facts, hint=hint, code="insufficient_quota", retry_s=retry_s)
        while self._requests and self._requests[0] <= now - _MINUTE_S:
            self._requests.popleft()
        if limits.requests_per_minute:
            if len(self._requests) >= limits.requests_per_minute:
                what = (
                    f"the key {self.name!r} has reached its limit of {limits.requests_per_minute} requests per minute"
                )
                hint = "try again after the seconds in retry-after, or raise requests_per_minute in the file of keys"
                retry_s = self._requests[0] + _MINUTE_S - now
                raise RequestRefused(429, what, hint=hint, code="rate_limit_exceeded", retry_s=retry_s)
            self._requests.append(now)

    def reserve(self, num_tokens: int, *, own: int = 0) -> None:
        """Reserve `num_tokens` of the daily quota for a request. `add_tokens` releases them when it ends.

        `own`: how many the request has reserved before. They do not become free while it waits.

        Raises `RequestRefused` (HTTP status 429), and reserves nothing, if the quota has fewer left."""
        now, limit = self._clock(), self.limits.tokens_per_day
        used = self._tokens_of_today(now)
        if limit and used + self.num_reserved + num_tokens > limit:
            what = f"the key {self.name!r} has too few of its {limit} tokens of today (UTC) left"
            facts = f"{used} are used, {self.num_reserved - own} reserved for running requests, and this one may take"
            facts += f" {own + num_tokens}"
            waits = used + own + num_tokens <= limit
            hint = "ask for a shorter answer, or wait for the next day (retry-after has the seconds)"
            if own + num_tokens > limit:
                hint = "ask for a shorter answer, or raise tokens_per_day in the file of keys: a day has fewer tokens"
            hint = "try again when those have ended" if waits else hint
            retry_s = 1.0 if waits else self._day_ends - now
            raise RequestRefused(429, what, facts, hint=hint, code="insufficient_quota", retry_s=retry_s)
        self.num_reserved += num_tokens

    def add_tokens(self, num_tokens: int, *, reserved: int = 0) -> None:
        """Add the tokens that a finished request used to those of the day, and release the `reserved` ones."""
        self.num_reserved -= reserved
        self.num_tokens = self._tokens_of_today(self._clock()) + num_tokens

    def _tokens_of_today(self, now: float) -> int:
        """Return the tokens used today. A day lasts to the next 0:00 UTC, but at least 12 hours and at most 36."""
        if now >= self._day_ends:
            left = _DAY_S - self._wall() % _DAY_S
            self._day_ends, self.num_tokens = now + left + _DAY_S * (left < _DAY_S / 2), 0
        return self.num_tokens


class Keys:
    """The API keys that a gateway accepts. `limits` maps the name of each key to its limits; `clock` and `wall` are as
    in `KeyUse`."""

    def __init__(
        self,
        limits: Mapping[str, KeyLimits],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not limits:
            raise ConfigError("there are no API keys", hint='add one: [me] and below it sha256 = "..."')
        for name, key in limits.items():
            if len(key.sha256) != 64 or not set(key.sha256.lower()) <= set(string.hexdigits):
                hint = 'printf %s "$KEY" | sha256sum prints it'
                raise ConfigError(f"{name}.sha256 is not a SHA-256", f"{len(key.sha256)} characters", hint=hint)
            if min(key.requests_per_minute, key.tokens_per_day) < 0:
                raise ConfigError(
                    f"a limit of the key {name!r} is below 0", hint="give a positive number, or 0 for no limit"
                )
        self._by_digest = dict[str, KeyUse]()
        for name, key in limits.items():
            use = KeyUse(name, key, clock=clock, wall=wall)
            other = self._by_digest.setdefault(key.sha256.lower(), use)
            if other is not use:
                facts = f"[{other.name}] and [{name}]"
                raise ConfigError("two names have the same key", facts, hint="give each name a key of its own")

    @staticmethod
    def of(key: str) -> Keys:
        """Return a `Keys` that accepts one key, without limits. `key` is the key itself, not its digest."""
        return Keys({"key": KeyLimits(sha256=hashlib.sha256(key.encode()).hexdigest())})

    @staticmethod
    def read(path: Path) -> Keys:
        """Read a TOML file of keys. Raises `ConfigError` if it is missing or invalid."""
        if not path.is_file():
            hint = 'write one: [me] and below it sha256 = "...", which printf %s "$KEY" | sha256sum prints'
            raise ConfigError(f"no file of keys at {path}", hint=hint)
        found: dict[str, KeyLimits] = {}
        for name, fields in read(path).items():
            try:
                found[name] = msgspec.convert(fields, KeyLimits)
            except msgspec.ValidationError as error:
                known = KeyLimits.__struct_fields__
                missing = "unknown field" not in str(error)
                hint = (
                    f'write [{name}] and below it sha256 = "..."'
                    if missing
                    else nearest(str(error).rpartition("field `")[2].rstrip("`"), known)
                )
                raise ConfigError(f"{path} is not a file of API keys", f"[{name}]: {error}", hint=hint) from None
        return Keys(found)

    def find(self, given: bytes) -> KeyUse:
        """Return the key that a client sent. Raises `RequestRefused` (HTTP status 401) for an unknown one.

        Digests are compared, so the time of a comparison does not reveal anything about the keys."""
        found = self._by_digest.get(hashlib.sha256(given).hexdigest())
        if found is None:
            facts = "it is none of this gateway's keys" if given else "the request has none"
            hint = "send a key of this gateway as authorization: Bearer KEY, or as x-api-key: KEY"
            raise RequestRefused(401, "the API key is missing or wrong", facts, hint=hint, code="invalid_api_key")
        return found
