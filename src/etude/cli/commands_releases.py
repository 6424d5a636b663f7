"""Defines the arguments of ``etude release``. Imports no library, so that `etude --help` is fast."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, add_channel, add_set, group, place, reason
from etude.cli.commands_feedback import add_folder


def add_release_commands(commands: Commands[Parser]) -> None:
    """Add `etude release` with its commands."""
    release = group(commands, "release", "bring a new version to users: gate, canary, promotion, rollback")
    begin = add(release, "begin", "releases:begin", "begin a release of a version against the branch stable")
    begin.add_argument("store", type=place, metavar="RUN|STORE", help="a run, or a store of weights")
    begin.add_argument("version", metavar="VERSION", help="v000003, 3, or a longer part of its name")
    begin.add_argument("--settings", type=Path, required=True, metavar="FILE", help="the settings of the release")
    add_set(begin)
    add_channel(begin)
    gate = add(release, "gate", "releases:gate", "compare evaluations of the candidate and the stable version")
    for name in ("candidate", "stable"):
        gate.add_argument(f"--{name}", required=True, metavar="LABEL", help=f"the {name}'s name in the results")
    gate.add_argument("--parity", type=Path, metavar="FILE", help="the candidate's output of etude parity --json")
    gate.add_argument("--run", type=Path, metavar="RUN", help="refuse suites with tasks that this run was trained on")
    advance = add(release, "advance", "releases:advance", "complete what is pending, or do what the rules say now")
    observe = add(release, "observe", "releases:observe", "store outcomes of users")
    what = "JSON lines with id, subject, metric and value"
    observe.add_argument("outcomes", type=Path, nargs="?", metavar="FILE", help=what)
    observe.add_argument("--feedback", type=Path, metavar="FILE", help="signals of etude serve --feedback instead")
    add_folder(observe)
    listing = add(release, "list", "releases:list_releases", "list all releases")
    why = add(release, "why", "releases:why", "show every transition with its reason, and what the rules say now")
    why.add_argument("number", type=int, nargs="?", metavar="NUMBER", help="of the release (default: the newest)")
    for parser in (gate, why):
        help_text = "results of etude eval (default: %(default)s)"
        parser.add_argument("--evals", type=Path, default=Path("evals"), metavar="DIR", help=help_text)
    for parser in (advance, why):
        what = "with --feedback: dollars per kept change of both versions, at these prices"
        parser.add_argument("--prices", type=Path, metavar="FILE", help=what)
        what = "signals of etude serve --feedback"
        parser.add_argument("--feedback", type=Path, metavar="FILE", help=what)
        add_folder(parser)
    promote = add(release, "promote", "releases:promote", "make the candidate the stable version")
    hold = add(release, "hold", "releases:hold", "keep the canary at its share until it is resumed")
    resume = add(release, "resume", "releases:resume", "continue with a release that was held")
    rollback = add(release, "rollback", "releases:rollback", "give all users the version from before")
    for parser in (promote, hold, resume, rollback):
        parser.add_argument(
            "--reason", type=reason, required=True, metavar="TEXT", help="why; etude release why shows it"
        )
    for parser in (begin, advance, promote, rollback):
        parser.add_argument(
            "--key", type=Path, metavar="FILE", help="the private key that signs the channel's pointers"
        )
    for parser in (begin, gate, advance, observe, listing, why, promote, hold, resume, rollback):
        parser.add_argument(
            "--file",
            type=Path,
            default=Path("releases.sqlite"),
            metavar="FILE",
            help="the file of the releases (default: %(default)s)",
        )
