"""The path of the agent's program."""

from __future__ import annotations

from pathlib import Path

from etude.errors import MachineError

BUILT = Path(__file__).with_name("etude-agent")


def program() -> Path:
    """Return the path of the static agent program for this host's processor.

    Raises `MachineError` if it was not built.
    """
    if not BUILT.exists():
        hint = "install etude from a wheel, which contains it, or with a Rust toolchain"
        raise MachineError("the machine agent is missing", f"{BUILT} was not built", hint=hint)
    return BUILT
