"""What a command line is made of: arguments that are checked as they are read, and commands by name."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from etude.errors import Exit, InputError, StoreError, nearest

MAX_PORT = 65_535
LOCAL = "local"


class Parser(argparse.ArgumentParser):
    """argparse whose errors have etude's three parts."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\n  hint: {self.prog} --help", file=sys.stderr)
        raise SystemExit(Exit.BAD_INPUT)


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def within(low: float, high: float) -> Callable[[str], float]:
    """A kind of argument that is a number of a range, its ends among it. What is no number is in none."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return found

    return number


def written(text: str) -> Path:
    """An argument that is a file to be written when the work is done: a place for it must be there before."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is there, and yours")
    return path


def step(text: str) -> int:
    """An argument that is a version's step."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no step: a number from 0 on, of at most 9 digits")
    return int(text)


def port(text: str) -> int:
    """An argument that is a TCP port, 0 being any free one."""
    if not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 (any free one) to {MAX_PORT}")
    return int(text)


def cluster(text: str) -> str:
    """An argument that says on what to run: "local", or a Ray cluster."""
    if text not in (LOCAL, "ray") and not re.fullmatch(r"(ray://)?[A-Za-z0-9.:_\[\]-]+:[0-9]{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is nowhere: local, ray, HOST:PORT or ray://HOST:PORT")
    return text


def duration(text: str) -> float:
    """An argument that is a time, in seconds: "90s", "10m", "24h", "7d"."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 90s, 10m, 24h or 7d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def channel(text: str) -> str:
    """An argument that is a channel's name."""
    return _plain_name(text, "channel")


def branch(text: str) -> str:
    """An argument that is a branch's name, or the empty one for the channel itself."""
    return _plain_name(text, "branch") if text else text


def _plain_name(text: str, kind: str) -> str:
    if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", text):
        raise InputError(f"{kind} name {text!r} is not allowed", hint="use a-z, 0-9, _ and -, at most 64 of them")
    return text


def place(text: str) -> str:
    """An argument that is a store, and may be something else by a path. A URL that no store speaks is refused."""
    scheme, has_scheme, _ = text.partition("://")
    if has_scheme and scheme != "file":
        from etude.stores import open_store
        from etude.stores.locations import PROVIDERS, parse_bucket_url

        try:
            if scheme in ("http", "https", "memory"):
                open_store(text)
            elif scheme.lower() not in PROVIDERS:
                known = nearest(scheme.lower(), [*PROVIDERS, "file", "http", "https", "memory"])
                raise InputError(f"no store speaks {scheme[:20]!r}", hint=known)
            else:
                parse_bucket_url(text)
        except StoreError as error:
            raise InputError(error.what, error.facts, hint=error.hint) from None
    return text


def public_key(text: str) -> bytes:
    """An argument that is an Ed25519 public key."""
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("a public key is 64 hex characters: etude weights key says them")
    return bytes.fromhex(text)


Commands = argparse._SubParsersAction  # argparse has no public name for it


def add(commands: Commands[Parser], name: str, command: str, text: str) -> Parser:
    """A command of this name. Its work is `command`, "module:function" of this folder."""
    parser: Parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser
