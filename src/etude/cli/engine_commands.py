"""``etude engines``: its commands and what they are given."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import Commands, Parser, add


def engine_commands(commands: Commands[Parser]) -> None:
    engines = commands.add_parser("engines", help="engines of another make: install, look, try").add_subparsers(
        required=True, metavar="COMMAND"
    )
    install = add(engines, "install", "engines:install_kind", "make an environment for an engine; goes on where it was")
    install.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    listing = add(engines, "list", "engines:listed", "every kind of engine, and whether it is here")
    check = add(engines, "check", "engines:check", "start one over a tiny model, sample, score, and follow a version")
    install.add_argument("kind", choices=["vllm", "sglang"], metavar="KIND", help="vllm or sglang")
    check.add_argument(
        "kind", choices=["reference", "vllm", "sglang"], metavar="KIND", help="reference, vllm or sglang"
    )
    for parser in (install, listing, check):
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="DIR",
            help="of the environment (default: $ETUDE_VLLM, $ETUDE_SGLANG, or the user's cache)",
        )
