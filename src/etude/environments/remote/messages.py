"""The messages of E2B's HTTP API that etude supports: REST for sandboxes, RPC for processes and files.

The names on the wire are E2B's. Unknown fields are ignored in requests and responses. Fields named `etude` and the
class `Exact` are extensions that only etude's client and server use. Written from the published behaviour of E2B's API.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base class of the RPC messages; sets the field names of protobuf's JSON format."""


# processes


class Config(Message, frozen=True, kw_only=True):
    """What a process runs: program `cmd`, its arguments, environment variables and working directory."""

    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(Message, frozen=True, kw_only=True):
    """Size of a terminal in columns and rows of characters."""

    cols: int = 0
    rows: int = 0


class Terminal(Message, frozen=True, kw_only=True):
    """The terminal that a process is to run in."""

    size: Size = Size()


class Exact(Message, frozen=True, kw_only=True):
    """Extension of etude: arguments of `Machine.exec` that E2B's `Start` request lacks.

    `key` names the command, so that a repeated request does not run it twice. `output_bytes` limits the output kept for
    the result. With `tell`, output is also sent while the command runs. `after` is the number of events that the client
    has received already; the stream continues there."""

    key: str
    deadline_ms: int
    output_bytes: int
    tell: bool = False
    after: int = 0  # number of events that the caller has received


class Start(Message, frozen=True, kw_only=True):
    """The request of the RPC Start: run the command `process`. `etude` are etude's extensions, if any.

    `pty` runs it in a terminal. `tag` is a name by which other requests find it. `stdin` False: no standard input."""

    process: Config = Config()
    pty: Terminal | None = None
    tag: str | None = None
    stdin: bool | None = None
    etude: Exact | None = None


class Selector(Message, frozen=True, kw_only=True):
    """Names a running process, by process id or by tag."""

    pid: int | None = None
    tag: str | None = None


class Selected(Message, frozen=True, kw_only=True):
    """Request of the RPCs Connect (stream the events of a running process) and CloseStdin."""

    process: Selector = Selector()


class Input(Message, frozen=True, kw_only=True):
    """Bytes for a process: `stdin` for its standard input, `pty` for its terminal."""

    stdin: bytes | None = None
    pty: bytes | None = None


class SendInput(Message, frozen=True, kw_only=True):
    """Request of the RPC SendInput: send bytes to a process.

    `etude_offset` (extension) is the position of these bytes in the whole input. After a broken connection, bytes that
    the process has received are skipped."""

    process: Selector = Selector()
    input: Input = Input()
    etude_offset: int | None = None


class InputData(Message, frozen=True, kw_only=True):
    """A later message of the RPC StreamInput: bytes for the process."""

    input: Input = Input()


class StreamInput(Message, frozen=True, kw_only=True):
    """One message of the request stream of StreamInput: `start` names the process, later ones have `data`."""

    start: Selected | None = None
    data: InputData | None = None


class SendSignal(Message, frozen=True, kw_only=True):
    """Request of the RPC SendSignal: send a signal, by protobuf name or number, to a process."""

    process: Selector = Selector()
    signal: str | int = "SIGNAL_UNSPECIFIED"


class Update(Message, frozen=True, kw_only=True):
    """Request of the RPC Update: resize the terminal of a process."""

    process: Selector = Selector()
    pty: Terminal | None = None


class ProcessInfo(Message, frozen=True, kw_only=True):
    """A running process in the response of the RPC List: its id, its tag, and what it runs."""

    config: Config
    pid: int
    tag: str | None = None


class ProcessList(Message, frozen=True, kw_only=True):
    """Response of the RPC List: all running processes."""

    processes: list[ProcessInfo] = []


class Began(Message, frozen=True, kw_only=True):
    """Event: a process was started; 0 if its process id is not known."""

    pid: int = 0


class Output(Message, frozen=True, kw_only=True):
    """Event: a process has written bytes to standard output, to standard error, or to its terminal (`pty`)."""

    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class Outcome(Message, frozen=True, kw_only=True):
    """Extension of etude: the fields of `ExecResult` that E2B's end event lacks, for requests with `Exact`."""

    output: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    wall_s: float = 0.0


class Ended(Message, frozen=True, kw_only=True):
    """Event: a process has ended.

    On E2B, `exited` is false if a signal ended it. `status` describes the end, for example "exit status 1"; `error` is
    the same text for an exit code other than 0."""

    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None
    etude: Outcome | None = None


class Event(Message, frozen=True, kw_only=True):
    """An event of a process; exactly one field is set. `keepalive` only keeps the connection open."""

    start: Began | None = None
    data: Output | None = None
    end: Ended | None = None
    keepalive: dict[str, str] | None = None


class ProcessEvent(Message, frozen=True, kw_only=True):
    """One message of the response stream of the RPCs Start (run a command) and Connect (attach to a process)."""

    event: Event = Event()


# files


class Entry(Message, frozen=True, kw_only=True):
    """A file, folder or link of a sandbox.

    `type` is a name such as "FILE_TYPE_FILE"; for a link it is the type of the file or folder to which it leads. `size`
    is in bytes, as text, since protobuf's JSON has 64-bit numbers as text. `mode` has the permission bits as a number,
    and `permissions` as text, such as "-rw-r--r--". `modified_time` is in RFC 3339."""

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
    """Response of the RPCs Stat, MakeDir and Move: the file or folder after the operation."""

    entry: Entry = Entry()


class Path(Message, frozen=True, kw_only=True):
    """Request of the RPCs Stat, MakeDir and Remove."""

    path: str = ""


class Move(Message, frozen=True, kw_only=True):
    """Request of the RPC Move: move a file or folder from path `source` to path `destination`."""

    source: str = ""
    destination: str = ""


class ListDir(Message, frozen=True, kw_only=True):
    """Request of the RPC ListDir: list a folder, `depth` levels deep (0 counts as 1)."""

    path: str = ""
    depth: int = 0


class Entries(Message, frozen=True, kw_only=True):
    """Response of the RPC ListDir: the entries of a folder."""

    entries: list[Entry] = []


class Watch(Message, frozen=True, kw_only=True):
    """Request of the RPCs WatchDir and CreateWatcher: watch a folder, with `recursive` also the folders below it.

    With `include_entry`, a change contains the new entry."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class Change(Message, frozen=True, kw_only=True):
    """A change in a watched folder: the path relative to it, a type such as "EVENT_TYPE_CREATE", and the new entry."""

    name: str = ""
    type: str = "EVENT_TYPE_UNSPECIFIED"
    entry: Entry | None = None


class Watched(Message, frozen=True, kw_only=True):
    """One message of the response stream of the RPC WatchDir: the start, a change, or a keepalive."""

    start: dict[str, str] | None = None
    filesystem: Change | None = None
    keepalive: dict[str, str] | None = None


class Watcher(Message, frozen=True, kw_only=True):
    """Id of a watcher: response of CreateWatcher, request of GetWatcherEvents and RemoveWatcher."""

    watcher_id: str = ""


class Changes(Message, frozen=True, kw_only=True):
    """Response of the RPC GetWatcherEvents: the changes since the last call."""

    events: list[Change] = []


# machines


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base class of the REST messages. Each field gives its JSON name itself, since E2B's names follow no rule."""


class NewSandbox(Resource, frozen=True, kw_only=True):
    """Request: create a sandbox from the template or snapshot `template_id`, with a lease of `timeout` seconds.

    With `auto_pause` the sandbox is paused, not ended, when its lease ends. `metadata` are the client's own labels, and
    `env_vars` environment variables of all its commands. The server refuses the other fields."""

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
    """Request: set the lease of a sandbox to `timeout` seconds from now. Also the request of Connect and Resume."""

    timeout: int = 300
    memory: bool | None = None


class Refresh(Resource, frozen=True, kw_only=True):
    """Request: extend the lease of a sandbox to at least `duration` seconds from now."""

    duration: int = 60


class Fork(Resource, frozen=True, kw_only=True):
    """Request: create `count` sandboxes with the state of a running one, each with a lease of `timeout` seconds."""

    timeout: int = 15
    count: int = 1


class Pause(Resource, frozen=True, kw_only=True):
    """Request: pause a sandbox. Also the request for a snapshot, with an optional name.

    `memory` asks to store the memory as well as the files."""

    memory: bool | None = None
    name: str | None = None


class Sandbox(Resource, frozen=True, kw_only=True):
    """Response: a sandbox (its id and its template's) and how to connect to it.

    `envd_access_token` must be sent with each request to the sandbox. `domain`, if set, is the end of its host name."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID", default="")
    client_id: str = msgspec.field(name="clientID", default="")
    envd_version: str = msgspec.field(name="envdVersion", default="")
    envd_access_token: str | None = msgspec.field(name="envdAccessToken", default=None)
    domain: str | None = None


class SandboxDetail(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Response: the details of a sandbox.

    `started_at` and `end_at` (the end of its lease) are times in ISO 8601. `state` is "running" or "paused"."""

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
    """A snapshot that sandboxes can be created from: its id and the names given to it."""

    snapshot_id: str = msgspec.field(name="snapshotID")
    names: list[str] = []


class About(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Extension of etude: the fields of `RuntimeInfo`; `backend` is the name of the server's runtime."""

    backend: str
    isolation: str
    users: list[str]
    images: bool = False
    forks_memory: bool = False
    whole_snapshots: bool = True
    notes: list[str] = []
