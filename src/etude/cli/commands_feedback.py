"""The arguments of ``etude feedback``, and those of ``etude serve`` for feedback. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, group, positive, within


def add_feedback_commands(commands: Commands[Parser]) -> None:
    """Add ``etude feedback`` and its commands."""
    feedback = group(commands, "feedback", "signals from product use about served answers: import, show, erase")
    load = add(feedback, "import", "feedback:import_signals", "store signals from a file of JSON lines")
    load.add_argument("signals", type=Path, metavar="FILE", help="JSON lines with id, response_id, name and value")
    show = add(feedback, "show", "feedback:show", "count the signals by name and version of the weights")
    show.add_argument("--json", action="store_true", help="print JSON")
    erase = add(feedback, "erase", "feedback:erase", "delete the signals of a subject from a file without --capture")
    what = "ORGANISATION (the name of an API key; local without keys), or ORGANISATION/USER"
    erase.add_argument("subject", metavar="SUBJECT", help=what)
    for parser in (load, show, erase):
        parser.add_argument(
            "--file",
            type=Path,
            default=Path("feedback.sqlite"),
            metavar="FILE",
            help="the file of etude serve --feedback (default: %(default)s)",
        )
        add_folder(parser)
    _add_limits(load, "")


def add_feedback(serve: Parser) -> None:
    """Add the arguments of ``etude serve`` for feedback."""
    serve.add_argument(
        "--feedback",
        type=Path,
        metavar="FILE",
        help="accept signals about answers (POST /v1/feedback) and store them in this file",
    )
    _add_limits(serve, "feedback-")


def add_folder(parser: Parser) -> None:
    """Add the argument that says where the privacy folder of a file of signals is."""
    parser.add_argument(
        "--capture", type=Path, metavar="DIR", help="its folder of consent (default: where it was last used)"
    )


def _add_limits(parser: Parser, prefix: str) -> None:
    parser.add_argument(
        f"--{prefix}days",
        type=within(0.01, 3650),
        default=90.0,
        metavar="DAYS",
        help="accept and keep signals for this time after their answer (default: %(default)g)",
    )
    parser.add_argument(
        f"--{prefix}cap",
        type=positive,
        default=1000,
        metavar="N",
        help="maximum number of signals of one name that count for a user and a day of answers (default: %(default)s)",
    )
