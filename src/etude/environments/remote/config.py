"""Settings of the machine server and of its client."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import ranged

MIB = 1 << 20


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `etude machines serve`; the quota of each API key is a `keys.Quota`.

    With `domain`, sandboxes are reached at the host `49983-ID.DOMAIN` through your own proxy. Without it they are
    reached at the server's address, and a header names the sandbox. Limits of one sandbox: `max_running` concurrent
    commands; `max_file_bytes` for one upload or download; `log_bytes` of a command's output, kept for clients that
    reconnect. Seconds: `command_s` is the time limit of a command that has none of its own, `deadline_s` that of any
    other request, `paused_s` how long a paused sandbox is kept, and `drain_s` how long a shutdown waits for sandboxes.
    """

    host: str = "127.0.0.1"
    port: int = ranged(3000, low=0, high=65_535)
    domain: str = ""  # sandboxes are at 49983-ID.DOMAIN, through your proxy; "": at this address, named by a header
    max_file_bytes: int = ranged(64 * MIB, low=1)  # of one upload or download
    max_running: int = ranged(64, low=1)  # concurrent commands in one sandbox
    log_bytes: int = ranged(4 * MIB, low=64 << 10)  # output of a command kept for clients that reconnect
    command_s: float = ranged(86_400.0, low=1.0)  # time limit of a command without a deadline
    deadline_s: float = ranged(60.0, low=1.0)  # time limit of any other request
    paused_s: float = ranged(86_400.0, low=1.0)  # how long a paused sandbox is kept
    drain_s: float = ranged(30.0, low=0.0)  # how long running sandboxes are waited for at shutdown


@dataclass(frozen=True)
class ClientConfig:
    """Settings of `RemoteRuntime`.

    `template` is the service's template for machines without an image. `workdir` and `users` (those that can run
    commands) describe the machines of services other than etude's, which reports its own. A machine ends `lease_s`
    seconds after its client died. At most `parallel` machines are created at a time. `call_s` is the time limit in
    seconds of a call that runs no command. `tries` is the number of attempts of a call that is safe to repeat."""

    template: str = "base"  # the template for `prepare` without an image
    workdir: str = "/home/user"  # working directory on external services; etude's server knows its own
    users: tuple[str, ...] = ("user", "root")  # users that can run commands on external services
    lease_s: int = ranged(300, low=10)  # a machine ends so long after its client died
    parallel: int = ranged(32, low=1)  # concurrent requests that create machines
    call_s: float = ranged(60.0, low=1.0)  # time limit of a call that runs no command
    tries: int = ranged(5, low=1)  # attempts of a call that is safe to repeat
