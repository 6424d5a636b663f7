"""Commands to run in a rollout's machine (its sandbox): validated arguments, options, events and results."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import msgspec


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command that ran in a machine (a rollout's sandbox).

    `exit_code`: 128 + the signal's number if a signal killed the command. `output`: stdout and stderr interleaved.
    `truncated`: the output was longer than the limit, and its middle was replaced by a mark. `timed_out`: the command
    was killed at its deadline. `lost_s`: seconds of `wall_s` that other work on the host took from the command; 0 when
    not measured."""

    exit_code: int
    output: bytes
    timed_out: bool
    truncated: bool
    wall_s: float
    lost_s: float = 0.0


class ProcessStarted(msgspec.Struct, frozen=True):
    """Event: the first process of a command has started. `pid` is its process id inside the machine."""

    pid: int


class OutputChunk(msgspec.Struct, frozen=True):
    """Event: output of a command since the last event, before any truncation. `stream`: 1 for stdout, 2 for stderr."""

    stream: int
    data: bytes


OutputCallback = Callable[[ProcessStarted | OutputChunk], None]
"""Callback for events while a command runs. Called in the event loop; it must not block."""

MAX_COMMAND_BYTES = 1 << 20  # of arguments and environment variables, each counted with 16 bytes more


class ExecOptions(TypedDict, total=False):
    """Optional arguments of `Machine.exec`, which runs a command in a sandbox. `Command` has the defaults.

    `stdin`: all input at once, or an iterable that is read as the command reads it. `output_bytes`: the limit of the
    returned output; longer output loses its middle. `cwd`: a path below the working directory, or an absolute one; ""
    is the working directory. `env`: variables to add to those of the machine. `user`: one of `RuntimeInfo.users`; "" is
    the image's user. `on_output`: a callback for all output as it comes; stdout and stderr are then separate pipes."""

    stdin: bytes | AsyncIterable[bytes]
    output_bytes: int
    cwd: str
    env: Mapping[str, str]
    user: str
    on_output: OutputCallback | None


@dataclass(frozen=True)
class Command:
    """The validated arguments of one `Machine.exec` call, with defaults. Machines make it with `Command.of`.

    `key` makes the call idempotent: a repeated call with the same key gets the result of the first one. The options are
    those of `ExecOptions`.

    >>> Command.of(["ls", "-l"], key="1", deadline_s=5, user="root").cwd
    ''
    >>> Command.of([], key="1", deadline_s=5)
    Traceback (most recent call last):
    ValueError: a command has at least one word and no NUL byte
    """

    argv: tuple[str, ...]
    key: str
    deadline_s: float
    stdin: bytes | AsyncIterable[bytes] = b""
    output_bytes: int = 65_536
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    on_output: OutputCallback | None = None

    @classmethod
    def of(cls, argv: Sequence[str], *, key: str, deadline_s: float, **options: Unpack[ExecOptions]) -> Command:
        """Check the arguments of `Machine.exec` and return them as a `Command`.

        Raises `ValueError` for an empty or too long command line, NUL bytes, wrong types, or a deadline that is not
        positive."""
        if isinstance(argv, str):
            raise ValueError(f"a command is a list of words, not the text {argv[:80]!r}")
        return cls(tuple(argv), key, deadline_s, **options)

    def __post_init__(self) -> None:
        self._check_types()
        words = [self.user, self.cwd, *self.argv, *(f"{name}={value}" for name, value in self.env.items())]
        if not self.argv or not self.argv[0] or any("\0" in word for word in words):
            raise ValueError("a command has at least one word and no NUL byte")
        if any(not name or "=" in name for name in self.env):
            raise ValueError("a variable's name is not empty and has no '='")
        if sum(len(os.fsencode(word)) + 16 for word in words) > MAX_COMMAND_BYTES:
            raise ValueError("the command line is too long")

    def _check_types(self) -> None:
        """Check the types at run time: a plug-in's call may not have been type-checked."""
        texts = [self.key, self.user, self.cwd, *self.argv, *self.env, *self.env.values()]
        strange = [one for one in texts if not isinstance(one, str)]
        if strange:
            raise ValueError(f"a command's words, variables, key, folder and user are texts, not {strange[0]!r:.80}")
        stdin: object = self.stdin
        if not isinstance(stdin, bytes | AsyncIterable):
            kind = type(stdin).__name__
            raise ValueError(f"a command's stdin is bytes or an async iterable of bytes, not {kind}: encode a text")
        if not self.deadline_s > 0:
            raise ValueError(f"a command's deadline_s is a number of seconds over 0, not {self.deadline_s}")
        if self.output_bytes < 0:
            raise ValueError(f"a command's output_bytes is 0 or more, not {self.output_bytes}")

    @property
    def has_input(self) -> bool:
        """Whether stdin is not empty."""
        return self.stdin != b""

    def check_user(self, users: Sequence[str]) -> None:
        """Raise `ValueError` when the command names a user that is not one of `users`."""
        if self.user and self.user not in users:
            known = (
                f"users are {', '.join(users)}"
                if any(users)
                else "the image names no users (no /etc/passwd): leave `user` out"
            )
            raise ValueError(f"a command cannot run as {self.user!r}; {known}")


def check_count(n: int) -> None:
    """Raise `ValueError` when the number of forks is below 1."""
    if n < 1:
        raise ValueError(f"n is a number from 1 on, not {n}")


def check_max_bytes(max_bytes: int) -> None:
    """Raise `ValueError` for a negative limit."""
    if max_bytes < 0:
        raise ValueError(f"max_bytes is 0 or more, not {max_bytes}")
