"""The parser of the command line, the types of its arguments, and arguments that several commands share.

A type is a function that converts the text of an argument. For a text that is not allowed it raises
`argparse.ArgumentTypeError`, or an `InputError`, which the command line prints."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from etude.errors import Exit, InputError, StoreError, nearest

MAX_PORT = 65_535
LOCAL = "local"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that prints its errors in the format of an `EtudeError`."""

    def error(self, message: str) -> NoReturn:
        self._refuse(message, hint=f"{self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and exit with an error if some are unknown.

        Each command's own parser refuses unknown arguments, so that the hint names the command and not only `etude`."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return known, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self._refuse(
                f"unknown {name} {value!r}", hint=f"{nearest(str(value), action.choices)} ({self.prog} --help)"
            )

    def _refuse(self, message: str, *, hint: str) -> NoReturn:
        print(f"error: {message}\n  hint: {hint}", file=sys.stderr)
        raise SystemExit(Exit.BAD_INPUT)


def reason(text: str) -> str:
    """Convert an argument to the reason of a decision, which is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a reason is empty: say in some words why")
    return text.strip()


def positive(text: str) -> int:
    """Convert an argument to an integer of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def within(low: float, high: float) -> Callable[[str], float]:
    """Return a function that converts an argument to a number from `low` to `high`, both inclusive."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return found

    return number


def output_file(text: str) -> Path:
    """Convert an argument to the path of a file that a command writes at its end.

    Its folder must exist and be writable now."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: give a file in an existing folder that you can write to"
        )
    return path


def step(text: str) -> int:
    """Convert an argument to a training step, from 0."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: an integer from 0, at most 9 digits")
    return int(text)


def port(text: str) -> int:
    """Convert an argument to a TCP port; 0 means any free port."""
    if not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: an integer from 0 (any free port) to {MAX_PORT}")
    return int(text)


def origin(text: str) -> str:
    """Convert an argument to an origin of web pages as browsers send it, scheme://host[:port] in small letters; or "*".

    One final "/" is removed."""
    found = text.lower().removesuffix("/")
    host = r"[a-z0-9._-]+|\[[0-9a-f:.]+\]"
    if text != "*" and not re.fullmatch(rf"[a-z][a-z0-9+.-]*://({host})(:[0-9]{{1,5}})?", found):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin: write https://example.org, without a path, or *")
    return found


def cluster(text: str) -> str:
    """Check an argument that says where a run's processes run: "local", "ray", or the address of a Ray cluster."""
    if text not in (LOCAL, "ray") and not re.fullmatch(r"(ray://)?[A-Za-z0-9.:_\[\]-]+:[0-9]{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a cluster: write local, ray, HOST:PORT or ray://HOST:PORT")
    return text


def duration(text: str) -> float:
    """Convert an argument such as "90s", "10m", "24h" or "7d" to seconds."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: write 90s, 10m, 24h or 7d")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def channel(text: str) -> str:
    """Check the name of a channel: a series of versions of one model's weights in a store. Raises `InputError`."""
    return _plain_name(text, "channel")


def branch(text: str) -> str:
    """Check the name of a branch: a second pointer to a version of a channel. "" is the channel itself.

    Raises `InputError`."""
    return _plain_name(text, "branch") if text else text


def _plain_name(text: str, kind: str) -> str:
    if not re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", text):
        raise InputError(f"{kind} name {text!r} is not allowed", hint="use at most 64 characters of a-z, 0-9, _ and -")
    return text


def place(text: str) -> str:
    """Check an argument that is a path or the URL of a store. Raises `InputError` for a URL that no store supports."""
    scheme, has_scheme, _ = text.partition("://")
    if has_scheme and scheme != "file":
        from etude.stores import open_store
        from etude.stores.locations import PROVIDERS, parse_bucket_url

        try:
            if scheme in ("http", "https", "memory"):
                open_store(text)
            elif scheme.lower() not in PROVIDERS:
                known = nearest(scheme.lower(), [*PROVIDERS, "file", "http", "https", "memory"])
                raise InputError(f"no kind of store has URLs that begin with {scheme[:20]!r}", hint=known)
            else:
                parse_bucket_url(text)
        except StoreError as error:
            raise InputError(error.what, error.facts, hint=error.hint) from None
    return text


def public_key(text: str) -> bytes:
    """Convert an Ed25519 public key from 64 hex characters to bytes."""
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError("a public key has 64 hex characters: etude weights key prints it")
    return bytes.fromhex(text)


Commands = argparse._SubParsersAction  # argparse has no public name for it


def add(commands: Commands[Parser], name: str, command: str, text: str) -> Parser:
    """Add the command `name` to the parser, and return the parser of its arguments.

    `command` is the function to call, as "module:function" of this package. `text` is the command's help."""
    parser: Parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=command)
    return parser


def group(commands: Commands[Parser], name: str, help: str) -> Commands[Parser]:
    """Add a command that has subcommands, such as `etude weights`. Returns the object to which to add them."""
    return commands.add_parser(name, help=help, description=help).add_subparsers(required=True, metavar="COMMAND")


def add_run(parser: Parser) -> None:
    """Add the argument that names a run."""
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="a run folder (default: the newest in runs/)")


def add_set(parser: Parser) -> None:
    """Add `--set`."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override a setting of the config (repeatable)"
    )


def add_channel(parser: Parser) -> None:
    """Add `--name`, the name of a channel of weights."""
    parser.add_argument("--name", type=channel, default="policy", metavar="CHANNEL", help="channel (default: policy)")


def add_backend(parser: Parser) -> None:
    """Add `--backend`, the kind of machines."""
    parser.add_argument(
        "--backend", default="namespace", metavar="NAME", help="kind of machines (default: %(default)s)"
    )


def add_backend_and_jobs(parser: Parser) -> None:
    """Add `--backend` and `--jobs`."""
    add_backend(parser)
    parser.add_argument("--jobs", type=positive, metavar="N", help="machines in parallel (default: two per core)")


def add_unbounded_memory(parser: Parser) -> None:
    """Add `--unbounded-memory`, for commands that run code of other people in machines."""
    what = "accept machines whose memory has no limit on this host"
    parser.add_argument("--unbounded-memory", action="store_true", help=what)
