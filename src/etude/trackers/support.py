"""Helpers of the built-in trackers: import of libraries, metric names, configs without secrets, final results."""

from __future__ import annotations

import importlib
import json
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import PluginRefused
from etude.plugins import described

HIDDEN = "***"
_SECRET = (
    r"(?:passwords?|passwd|passphrase|secrets?|token|credentials?|authorization|(?:api|access|private|secret)[_-]?key)"
)
_SECRET_NAME = re.compile(rf"{_SECRET}$", re.IGNORECASE)
_SECRET_IN_TEXT = (
    re.compile(r"(?P<name>://[^/@\s:]*:)[^/@\s]+(?=@)"),  # postgresql://user:password@host
    re.compile(r"(?P<name>https?://)[^/@\s:]+(?=@)"),  # https://token@host
    re.compile(rf"(?P<name>{_SECRET}\s*=\s*)[^&\s]+", re.IGNORECASE),  # a DSN, a query of a URL, an option
)


class TrackerWarning(UserWarning):
    """A warning that a tracker wants the user to see: in the terminal and in the run's events.

    All other warnings, and what its library prints, go to the tracker's log file.
    """


def load_library(module: str, tracker: str) -> Any:
    """Import and return `module`, which the built-in tracker `tracker` needs. Raises `PluginRefused` when it cannot."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a library may raise anything when it is imported
        facts = f"importing {module} raised {described(error)}"
        if isinstance(error, ModuleNotFoundError):
            facts = f"{error.name} is not installed on host {socket.gethostname()}"
        hint = f"pip install 'etude[{tracker}]'"
        raise PluginRefused(f"tracker {tracker} cannot be used", facts, hint=hint) from None


def split_name(name: str) -> tuple[str, str]:
    """Split a metric name into (part, rest). Each part of a run, such as each evaluation, counts its own steps.

    >>> split_name("rl/lag/0"), split_name("eval/during/rate")
    (('rl', 'lag/0'), ('eval/during', 'rate'))
    """
    words = name.split("/")
    length = 2 if words[0] == "eval" and len(words) > 2 else 1
    return "/".join(words[:length]), "/".join(words[length:])


def by_part(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group metrics by the part of the run that their names begin with (`split_name`).

    >>> by_part({"rl/loss": 0.5, "eval/during/rate": 1.0})
    {'rl': {'rl/loss': 0.5}, 'eval/during': {'eval/during/rate': 1.0}}
    """
    parts: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        parts.setdefault(split_name(name)[0], {})[name] = value
    return parts


def without_secrets(config: Any, name: str = "") -> Any:
    """Return a copy of a config, which is plain data, with its secrets replaced by ``***``. `name` is the key of
    `config` in the mapping that contains it.

    Secrets are strings under a key whose name ends in "password", "token", "api_key" and the like, the password of a
    URL, ``password=...`` within a string, and the value after an option such as "--api-key" in a list of arguments.

    >>> without_secrets({"api_key": "k", "turn_tokens": 24, "ledger": "postgresql://me:pw@host/db?sslmode=require"})
    {'api_key': '***', 'turn_tokens': 24, 'ledger': 'postgresql://me:***@host/db?sslmode=require'}
    >>> without_secrets(["--api-key", "k", "--hf-token=k", "--port", "80"])
    ['--api-key', '***', '--hf-token=***', '--port', '80']
    """
    if isinstance(config, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in config.items()}
    if isinstance(config, Sequence) and not isinstance(config, str):
        options = ["", *(item if isinstance(item, str) and item.startswith("-") else "" for item in config)]
        return [without_secrets(item, option or name) for item, option in zip(config, options, strict=False)]
    if not isinstance(config, str):
        return config
    if _SECRET_NAME.search(name) and not config.startswith("--"):
        return HIDDEN
    for pattern in _SECRET_IN_TEXT:
        config = pattern.sub(rf"\g<name>{HIDDEN}", config)
    return config


def final_results(folder: Path | str) -> dict[str, float]:
    """Read the final results of a run from its summary.json, by names such as "result/heldout/after/rate".

    Returns {} for a run that has not finished."""
    try:
        summary = json.loads((Path(folder) / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(summary, dict) or not summary.get("finished"):
        return {}
    kept = {name: summary.get(name) for name in ("heldout", "transfer", "baselines", "wall_s")}
    return dict(numbers(kept, "result"))


def numbers(values: Mapping[str, Any], where: str) -> Iterator[tuple[str, float]]:
    """Yield (path, number) for every number in nested mappings. `where` is the prefix of all paths.

    Lists, strings and booleans are left out.

    >>> dict(numbers({"loss": 0.5, "reward": {"mean": 1}, "kind": "x"}, "rl"))
    {'rl/loss': 0.5, 'rl/reward/mean': 1.0}
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{where}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{where}/{name}", float(value)
