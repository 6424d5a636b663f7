"""The messages of E2B's HTTP API that etude supports: REST for sandboxes, RPC for processes and files.

The names on the wire are E2B's. Unknown fields are ignored in requests and responses. Fields named `etude` and the
class `Exact` are extensions between etude's client and server. Written from the published behaviour of E2B's API.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of the RPC messages, with protobuf's JSON names."""


# processes


class Config(Message, frozen=True, kw_only=True):
    """The command line, environment and working directory of a process."""

    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(Message, frozen=True, kw_only=True):
    """The size of a terminal."""

    cols: int = 0
    rows: int = 0


class Terminal(Message, frozen=True, kw_only=True):
    """A terminal for a process."""

    size: Size = Size()


class Exact(Message, frozen=True, kw_only=True):
    """Extension of etude: the arguments of `Machine.exec`, and where to continue a broken stream. `tell`: send output
    while the command runs, too."""

    key: str
    deadline_ms: int
    output_bytes: int
    tell: bool = False
    after: int = 0  # number of events that the caller has received


class Start(Message, frozen=True, kw_only=True):
    """Request: run a command."""

    process: Config = Config()
    pty: Terminal | None = None
    tag: str | None = None
    stdin: bool | None = None
    etude: Exact | None = None


class Selector(Message, frozen=True, kw_only=True):
    """Selects a running process by pid or tag."""

    pid: int | None = None
    tag: str | None = None


class Selected(Message, frozen=True, kw_only=True):
    """Request of the RPCs Connect (stream the events of a running process) and CloseStdin."""

    process: Selector = Selector()


class Input(Message, frozen=True, kw_only=True):
    """Input for a process, through a pipe or a terminal."""

    stdin: bytes | None = None
    pty: bytes | None = None


class SendInput(Message, frozen=True, kw_only=True):
    """Request: send input. `etude_offset` (extension): position of these bytes; received bytes are not sent twice."""

    process: Selector = Selector()
    input: Input = Input()
    etude_offset: int | None = None


class InputData(Message, frozen=True, kw_only=True):
    """A piece of input in a stream."""

    input: Input = Input()


class StreamInput(Message, frozen=True, kw_only=True):
    """Message of an input stream: the first has the process, the others its input."""

    start: Selected | None = None
    data: InputData | None = None


class SendSignal(Message, frozen=True, kw_only=True):
    """Request: send a signal to a process."""

    process: Selector = Selector()
    signal: str | int = "SIGNAL_UNSPECIFIED"


class Update(Message, frozen=True, kw_only=True):
    """Request: resize the terminal of a process."""

    process: Selector = Selector()
    pty: Terminal | None = None


class ProcessInfo(Message, frozen=True, kw_only=True):
    """A running process."""

    config: Config
    pid: int
    tag: str | None = None


class ProcessList(Message, frozen=True, kw_only=True):
    """Response: all running processes."""

    processes: list[ProcessInfo] = []


class Began(Message, frozen=True, kw_only=True):
    """Event: the process was started."""

    pid: int = 0


class Output(Message, frozen=True, kw_only=True):
    """Event: output of the process."""

    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class Outcome(Message, frozen=True, kw_only=True):
    """Extension of etude: `ExecResult` without the exit code, for requests with `Exact`."""

    output: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    wall_s: float = 0.0


class Ended(Message, frozen=True, kw_only=True):
    """Event: the process has ended."""

    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None
    etude: Outcome | None = None


class Event(Message, frozen=True, kw_only=True):
    """An event of a process; exactly one field is set."""

    start: Began | None = None
    data: Output | None = None
    end: Ended | None = None
    keepalive: dict[str, str] | None = None


class ProcessEvent(Message, frozen=True, kw_only=True):
    """One message of the response stream of the RPCs Start (run a command) and Connect (attach to a process)."""

    event: Event = Event()


# files


class Entry(Message, frozen=True, kw_only=True):
    """A file, folder or link."""

    name: str = ""
    type: str = "FILE_TYPE_UNSPECIFIED"
    path: str = ""
    size: str = "0"  # protobuf's JSON has 64-bit numbers as text
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: str | None = None
    symlink_target: str | None = None
    is_symlink: bool = False


class WithEntry(Message, frozen=True, kw_only=True):
    """Response of the RPCs Stat, MakeDir and Move: the file or folder that they are about."""

    entry: Entry = Entry()


class Path(Message, frozen=True, kw_only=True):
    """Request of the RPCs Stat, MakeDir and Remove."""

    path: str = ""


class Move(Message, frozen=True, kw_only=True):
    """Request: move a file or folder."""

    source: str = ""
    destination: str = ""


class ListDir(Message, frozen=True, kw_only=True):
    """Request: list a folder, `depth` levels deep (0: one level)."""

    path: str = ""
    depth: int = 0


class Entries(Message, frozen=True, kw_only=True):
    """Response: the entries of a folder."""

    entries: list[Entry] = []


class Watch(Message, frozen=True, kw_only=True):
    """Request: watch a folder."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class Change(Message, frozen=True, kw_only=True):
    """A change in a watched folder."""

    name: str = ""
    type: str = "EVENT_TYPE_UNSPECIFIED"
    entry: Entry | None = None


class Watched(Message, frozen=True, kw_only=True):
    """Message of the response stream of WatchDir."""

    start: dict[str, str] | None = None
    filesystem: Change | None = None
    keepalive: dict[str, str] | None = None


class Watcher(Message, frozen=True, kw_only=True):
    """The id of a watcher that the client polls."""

    watcher_id: str = ""


class Changes(Message, frozen=True, kw_only=True):
    """Response: the changes since the last poll."""

    events: list[Change] = []


# machines


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the REST messages. Their names are not regular, so each field has its own."""


class NewSandbox(Resource, frozen=True, kw_only=True):
    """Request: create a sandbox from a template or a snapshot."""

    template_id: str = msgspec.field(name="templateID")
    timeout: int = 300  # seconds
    auto_pause: bool = msgspec.field(name="autoPause", default=False)
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = msgspec.field(name="envVars", default=None)
    mcp: dict[str, object] | None = None
    network: dict[str, object] | None = None
    iam: dict[str, object] | None = None
    volume_mounts: list[object] | None = msgspec.field(name="volumeMounts", default=None)


class Lease(Resource, frozen=True, kw_only=True):
    """Request: set the lease to `timeout` seconds from now. Also the request of Connect and Resume."""

    timeout: int = 300
    memory: bool | None = None


class Refresh(Resource, frozen=True, kw_only=True):
    """Request: extend the lease to at least `duration` seconds from now."""

    duration: int = 60


class Fork(Resource, frozen=True, kw_only=True):
    """Request: create `count` sandboxes from a running one."""

    timeout: int = 15
    count: int = 1


class Pause(Resource, frozen=True, kw_only=True):
    """Request: pause a sandbox. Also the request of Snapshot, with an optional name."""

    memory: bool | None = None
    name: str | None = None


class Sandbox(Resource, frozen=True, kw_only=True):
    """Response: a sandbox and how to connect to it."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID", default="")
    client_id: str = msgspec.field(name="clientID", default="")
    envd_version: str = msgspec.field(name="envdVersion", default="")
    envd_access_token: str | None = msgspec.field(name="envdAccessToken", default=None)
    domain: str | None = None


class SandboxDetail(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Response: the details of a sandbox."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID")
    client_id: str = msgspec.field(name="clientID")
    envd_version: str = msgspec.field(name="envdVersion")
    started_at: str = msgspec.field(name="startedAt")
    end_at: str = msgspec.field(name="endAt")
    state: str  # "running", "paused"
    metadata: dict[str, str]
    cpu_count: int = msgspec.field(name="cpuCount", default=1)
    memory_mb: int = msgspec.field(name="memoryMB", default=0)
    disk_size_mb: int = msgspec.field(name="diskSizeMB", default=0)
    allow_internet_access: bool = msgspec.field(name="allowInternetAccess", default=False)


class SnapshotInfo(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """A snapshot that sandboxes can be created from."""

    snapshot_id: str = msgspec.field(name="snapshotID")
    names: list[str] = []


class About(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Extension of etude: the properties of the server's machines, as in `RuntimeInfo`."""

    backend: str
    isolation: str
    users: list[str]
    images: bool = False
    forks_memory: bool = False
    whole_snapshots: bool = True
    notes: list[str] = []
