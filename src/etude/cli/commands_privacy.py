"""The arguments of ``etude privacy``, and those of ``etude serve`` for capture. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, group, within

_LEVELS = ["off", "metrics", "capture", "train"]


def add_privacy_commands(commands: Commands[Parser]) -> None:
    """Add ``etude privacy`` and its commands."""
    privacy = group(commands, "privacy", "what may be kept of served conversations: consent, captured records, erasure")
    show = add(privacy, "show", "privacy:show", "show the consent of a subject, with its history and number of records")
    _add_subject(show, nargs="?", default=None)
    change = add(privacy, "set", "privacy:set_level", "set the consent level of an organisation or of one of its users")
    _add_subject(change)
    change.add_argument("level", choices=_LEVELS, metavar="LEVEL", help=", ".join(_LEVELS))
    erase = add(privacy, "erase", "privacy:erase", "destroy the key and the records of a subject, and trace their uses")
    _add_subject(erase)
    erase.add_argument(
        "--run",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="delete the subject's tokens from this run, and list its batches and versions with them (repeatable)",
    )
    export = add(privacy, "export", "privacy:export", "print what is kept of a subject: records, signals, sessions")
    _add_subject(export)
    export.add_argument("--redacted", action="store_true", help="without secrets, addresses, paths, keys and tokens")
    expire = add(privacy, "expire", "privacy:expire", "delete expired records (a gateway that captures does so hourly)")
    _add_folder(expire)


def add_capture(serve: Parser) -> None:
    """Add the arguments of ``etude serve`` for capture."""
    serve.add_argument(
        "--capture",
        type=Path,
        metavar="DIR",
        help="store answers in this folder, encrypted, if organisation and user consent",
    )
    serve.add_argument(
        "--capture-days",
        type=within(0.01, 3650),
        default=30.0,
        metavar="DAYS",
        help="delete captured records after this time (default: %(default)g)",
    )


def _add_subject(parser: Parser, nargs: str | None = None, default: None = None) -> None:
    what = "ORGANISATION (the name of an API key; local without keys), or ORGANISATION/USER"
    parser.add_argument("subject", metavar="SUBJECT", help=what, nargs=nargs, default=default)
    _add_folder(parser)


def _add_folder(parser: Parser) -> None:
    parser.add_argument(
        "--folder", type=Path, default=Path("privacy"), metavar="DIR", help="folder of --capture (default: privacy)"
    )
