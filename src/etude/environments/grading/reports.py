"""Our programs in machines, and how their word gets out: on one line of output that begins with a nonce.

Nobody can write that line who does not know the nonce, which comes on standard input and is in no file, argument or
environment. Code that shares the runner's process can find it: what a report is worth then is for canaries to say.
"""

from __future__ import annotations

import json
import secrets
from importlib import resources
from typing import Any

from etude.environments.grading.verdicts import Refused
from etude.records.command import ExecResult


def runner(name: str) -> str:
    """The source of one of the programs in `runners/`."""
    return (resources.files("etude.environments") / "runners" / f"{name}.py").read_text()


def new_nonce() -> str:
    return secrets.token_hex(16)


class NotTold(Refused):
    """A runner ended without its report."""


class NotStarted(NotTold):
    """Its program was not even there."""


def told(result: ExecResult, nonce: str) -> Any:
    """The plain data on the line that begins with the nonce. Raises `NotTold`."""
    marker = f"{nonce} ".encode()
    for line in result.output.split(b"\n"):
        if line.startswith(marker):
            try:
                return json.loads(line[len(marker) :])
            except (ValueError, RecursionError):
                raise NotTold("the report is not plain data") from None
    if result.timed_out:
        raise NotTold("the hidden tests did not end before their deadline")
    if result.truncated:
        raise NotTold("the results are too large")
    reason = f"the process ended with exit code {result.exit_code} before it reported"
    raise (NotStarted if result.exit_code in (126, 127) else NotTold)(reason)
