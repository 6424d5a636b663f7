"""The path of the agent's program."""

from __future__ import annotations

from pathlib import Path

from etude.errors import MachineError

BUILT = Path(__file__).with_name("etude-agent")


def program() -> Path:
    """Path of the static agent program for this machine's processor. Raises `MachineError` if it was not built."""
    if not BUILT.exists():
        hint = "install etude where there is a Rust toolchain, or from a wheel, which has it"
        raise MachineError("there is no machine agent", f"{BUILT} was not built", hint=hint)
    return BUILT
