"""API keys and their quotas.

The file of keys is TOML, with one table for each key. Only its owner may have access to it:

    [alice]
    key = "e2b_..."            # at least 16 characters
    max_live = 16              # sandboxes at the same time, including paused ones
    max_lifetime_s = 3600      # of one sandbox, including all renewals of its lease
    creations_per_minute = 120
    max_state_mib = 1024       # of paused sandboxes and named snapshots together

Keys are compared in constant time.
"""

from __future__ import annotations

import hmac
import stat
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from etude.environments.remote.api_errors import ApiError
from etude.errors import ConfigError, nearest

_MIN_KEY = 16
_MINUTE_S = 60.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key and the limits of the account that it belongs to.

    `max_live` counts sandboxes at the same time, including paused ones. `max_lifetime_s` limits the seconds that one
    sandbox lives, including all renewals of its lease. `max_state_mib` limits its paused sandboxes and named snapshots.
    """

    key: str
    max_live: int = 16
    max_lifetime_s: int = 3600
    creations_per_minute: int = 120
    max_state_mib: int = 1024


class Account:
    """One user of the server: name, quota, and how much of the quota is in use.

    `clock` returns seconds, for the limit of creations per minute."""

    def __init__(self, name: str, quota: Quota, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.quota, self._clock = name, quota, clock
        self.num_live = self.num_state_bytes = 0
        self._creations: deque[float] = deque()

    def add_live(self, n: int = 1) -> None:
        """Count `n` new sandboxes. Raises `ApiError` (429) and counts none if the quota does not allow them."""
        now = self._clock()
        while self._creations and self._creations[0] <= now - _MINUTE_S:
            self._creations.popleft()
        if self.num_live + n > self.quota.max_live:
            facts = f"{self.num_live} of {self.quota.max_live} are alive"
            hint = "kill some, or increase max_live of the key"
            raise ApiError(429, f"the quota of {self.name!r} does not allow {n} more machines", facts, hint=hint)
        if len(self._creations) + n > self.quota.creations_per_minute:
            wait_s = int(self._creations[0] + _MINUTE_S - now) + 1 if self._creations else int(_MINUTE_S)
            facts = f"{len(self._creations)} of {self.quota.creations_per_minute} in the last minute"
            headers = {"should-retry": "true", "retry-after": str(wait_s)}
            what = f"{self.name!r} creates machines faster than its quota allows"
            raise ApiError(429, what, facts, hint=f"try again in {wait_s} s", headers=headers)
        self.num_live += n
        self._creations.extend([now] * n)

    def remove_live(self, n: int = 1) -> None:
        """Stop counting `n` sandboxes, which have ended."""
        self.num_live -= n

    def add_state_bytes(self, n: int) -> None:
        """Count `n` bytes of a stored state (a paused sandbox or a named snapshot).

        Raises `ApiError` (429) and counts none if the quota does not allow them."""
        limit = self.quota.max_state_mib << 20
        if self.num_state_bytes + n > limit:
            facts = f"{n} bytes more than {self.num_state_bytes}, of {limit}"
            hint = "kill paused machines, delete named snapshots, or increase max_state_mib of the key"
            raise ApiError(429, f"the quota of {self.name!r} does not allow this state", facts, hint=hint)
        self.num_state_bytes += n

    def remove_state_bytes(self, n: int) -> None:
        """Stop counting `n` bytes of a stored state, which was released."""
        self.num_state_bytes -= n


class Keyring:
    """The accounts of a server, found by API key.

    `quotas` maps account names to keys and limits. Raises `ConfigError` if there is none, or for weak or equal keys."""

    def __init__(self, quotas: Mapping[str, Quota], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not quotas:
            raise ConfigError("there are no API keys", hint='add one: [me] and key = "..." of at least 16 characters')
        for name, quota in quotas.items():
            if len(quota.key) < _MIN_KEY or not quota.key.isascii() or not quota.key.isprintable():
                raise ConfigError(
                    f"the key of {name!r} is too weak",
                    f"{len(quota.key)} characters",
                    hint="python -c 'import secrets; print(secrets.token_hex(24))' prints a good one",
                )
        if len({quota.key for quota in quotas.values()}) < len(quotas):
            raise ConfigError("two accounts have the same key", hint="give each a different key")
        self._accounts = [(quota.key.encode(), Account(name, quota, clock=clock)) for name, quota in quotas.items()]

    @staticmethod
    def read(path: Path) -> Keyring:
        """Read a TOML file of API keys.

        Raises `ConfigError` if the file is invalid, or if users other than its owner have access to it."""
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} has keys and other users have access to it", hint=f"chmod 600 {path}")
            raw = tomllib.loads(path.read_text())
            _require_fields(path, raw)
            return Keyring(msgspec.convert(raw, dict[str, Quota]))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            hint = 'one table for each key, [alice] and key = "...": see docs/guides/machines-remote.md'
            raise ConfigError(f"{path} is not a valid file of keys", str(error), hint=hint) from None

    def secrets(self) -> list[bytes]:
        """Return all API keys as bytes. A secret derived from all of them seals exported snapshots."""
        return [key for key, _ in self._accounts]

    def account(self, given: str) -> Account | None:
        """Return the account with the API key `given`, or None if the key is unknown. Compares in constant time."""
        found, data = None, given.encode("utf-8", "replace")
        for key, account in self._accounts:
            if hmac.compare_digest(key, data):
                found = account
        return found


def _require_fields(path: Path, raw: Mapping[str, object]) -> None:
    """Raise `ConfigError` for an unknown field, with its table and the nearest known field."""
    known = Quota.__struct_fields__
    for name, table in raw.items():
        for field in table if isinstance(table, dict) else ():
            if field not in known:
                hint = f"{nearest(field, known)} (docs/guides/machines-remote.md)"
                raise ConfigError(f"{path}: unknown field {field!r} in [{name}]", hint=hint)
