"""Who may have machines, and how many: API keys, each with quotas of its own.

The file is TOML, one table a key, readable by its owner alone:

    [alice]
    key = "e2b_..."            # at least 16 characters
    max_live = 16              # machines alive at the same time, paused ones among them
    max_lifetime_s = 3600      # of one machine, however often its lease is renewed
    creations_per_minute = 120
    max_state_mib = 1024       # of paused machines and named snapshots together

A key is compared with every known one in constant time. Knows nothing of HTTP.
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

from etude.environments.remote.refusal import Refused
from etude.errors import ConfigError, nearest

_MIN_KEY = 16
_MINUTE_S = 60.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key and what it is good for."""

    key: str
    max_live: int = 16
    max_lifetime_s: int = 3600
    creations_per_minute: int = 120
    max_state_mib: int = 1024


class Account:
    """Whoever has one of the keys, and what they have taken of its quota."""

    def __init__(self, name: str, quota: Quota, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.quota, self._clock = name, quota, clock
        self.num_live = self.num_state_bytes = 0
        self._creations: deque[float] = deque()

    def take(self, n: int = 1) -> None:
        """Room for n more machines. Raises `Refused` (429)."""
        now = self._clock()
        while self._creations and self._creations[0] <= now - _MINUTE_S:
            self._creations.popleft()
        if self.num_live + n > self.quota.max_live:
            facts = f"{self.num_live} of {self.quota.max_live} are alive"
            hint = "kill those that are done with, or let the key have more (max_live)"
            raise Refused(429, f"the quota of {self.name!r} has no room for {n} more machines", facts, hint=hint)
        if len(self._creations) + n > self.quota.creations_per_minute:
            wait_s = int(self._creations[0] + _MINUTE_S - now) + 1 if self._creations else int(_MINUTE_S)
            facts = f"{len(self._creations)} of {self.quota.creations_per_minute} in the last minute"
            headers = {"should-retry": "true", "retry-after": str(wait_s)}
            what = f"{self.name!r} makes machines faster than its quota allows"
            raise Refused(429, what, facts, hint=f"try again in {wait_s} s", headers=headers)
        self.num_live += n
        self._creations.extend([now] * n)

    def give_back(self, n: int = 1) -> None:
        """Machines have ended."""
        self.num_live -= n

    def take_bytes(self, n: int) -> None:
        """Room for a state of n bytes that is kept however much others keep. Raises `Refused` (429)."""
        most = self.quota.max_state_mib << 20
        if self.num_state_bytes + n > most:
            facts = f"{n} bytes more than {self.num_state_bytes}, of {most}"
            hint = "kill paused machines and delete named snapshots, or let the key have more (max_state_mib)"
            raise Refused(429, f"the quota of {self.name!r} has no room for this state", facts, hint=hint)
        self.num_state_bytes += n

    def give_bytes_back(self, n: int) -> None:
        """A state is kept no longer."""
        self.num_state_bytes -= n


class Keyring:
    """The accounts by their keys."""

    def __init__(self, quotas: Mapping[str, Quota], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not quotas:
            raise ConfigError("there is no key", hint='write one: [me] and key = "..." of at least 16 characters')
        for name, quota in quotas.items():
            if len(quota.key) < _MIN_KEY or not quota.key.isascii() or not quota.key.isprintable():
                raise ConfigError(
                    f"the key of {name!r} is too weak",
                    f"{len(quota.key)} characters",
                    hint="python -c 'import secrets; print(secrets.token_hex(24))' says a good one",
                )
        if len({quota.key for quota in quotas.values()}) < len(quotas):
            raise ConfigError("two accounts have the same key", hint="each needs its own")
        self._accounts = [(quota.key.encode(), Account(name, quota, clock=clock)) for name, quota in quotas.items()]

    @staticmethod
    def read(path: Path) -> Keyring:
        """The keys of a file. Raises `ConfigError`."""
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} has keys and others may read it", hint=f"chmod 600 {path}")
            raw = tomllib.loads(path.read_text())
            _require_fields(path, raw)
            return Keyring(msgspec.convert(raw, dict[str, Quota]))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            hint = 'one table a key, [alice] and key = "...": see docs/guides/machines-remote.md'
            raise ConfigError(f"{path} is no file of keys", str(error), hint=hint) from None

    def secrets(self) -> list[bytes]:
        """All keys: what nobody has who is not told everything."""
        return [key for key, _ in self._accounts]

    def account(self, given: str) -> Account | None:
        """Whose key it is; None for one that nobody has. Takes the same time for every key of the same length."""
        found, data = None, given.encode("utf-8", "replace")
        for key, account in self._accounts:
            if hmac.compare_digest(key, data):
                found = account
        return found


def _require_fields(path: Path, raw: Mapping[str, object]) -> None:
    """Raises `ConfigError` for a field that no key has, naming its table and the nearest one."""
    known = Quota.__struct_fields__
    for name, table in raw.items():
        for field in table if isinstance(table, dict) else ():
            if field not in known:
                hint = f"{nearest(field, known)} (docs/guides/machines-remote.md)"
                raise ConfigError(f"{path}: unknown field {field!r} in [{name}]", hint=hint)
