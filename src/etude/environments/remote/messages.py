"""The messages of E2B's HTTP API that we speak, both sides of them: machines as REST, processes and files as RPC.

Names on the wire are E2B's; fields that we do not know are ignored, in requests and in answers. `Exact` is ours: what
a client of ours asks beside, and gets from a server of ours. Written from the published behaviour of E2B's API.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What all have in common: protobuf's names in JSON."""


# processes


class Config(Message, frozen=True, kw_only=True):
    """What to run."""

    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Size(Message, frozen=True, kw_only=True):
    """Of a terminal."""

    cols: int = 0
    rows: int = 0


class Terminal(Message, frozen=True, kw_only=True):
    """Asks for one."""

    size: Size = Size()


class Exact(Message, frozen=True, kw_only=True):
    """What our clients ask of our servers beside: the seam's own arguments, and where a broken stream goes on."""

    key: str
    deadline_ms: int
    output_bytes: int
    tell: bool = False
    after: int = 0  # events of this command that the caller has already


class Start(Message, frozen=True, kw_only=True):
    """Run a command."""

    process: Config = Config()
    pty: Terminal | None = None
    tag: str | None = None
    stdin: bool | None = None
    etude: Exact | None = None


class Selector(Message, frozen=True, kw_only=True):
    """Names a process that runs."""

    pid: int | None = None
    tag: str | None = None


class Selected(Message, frozen=True, kw_only=True):
    """A request about one process: Connect, CloseStdin."""

    process: Selector = Selector()


class Input(Message, frozen=True, kw_only=True):
    """Bytes for it."""

    stdin: bytes | None = None
    pty: bytes | None = None


class SendInput(Message, frozen=True, kw_only=True):
    """Give it input. `etude_offset`, ours: how many bytes came before; what is known of them is not given twice."""

    process: Selector = Selector()
    input: Input = Input()
    etude_offset: int | None = None


class InputData(Message, frozen=True, kw_only=True):
    """Of a stream of input."""

    input: Input = Input()


class StreamInput(Message, frozen=True, kw_only=True):
    """The process first, then its input."""

    start: Selected | None = None
    data: InputData | None = None


class SendSignal(Message, frozen=True, kw_only=True):
    """End it, more or less politely."""

    process: Selector = Selector()
    signal: str | int = "SIGNAL_UNSPECIFIED"


class Update(Message, frozen=True, kw_only=True):
    """Another size of its terminal."""

    process: Selector = Selector()
    pty: Terminal | None = None


class ProcessInfo(Message, frozen=True, kw_only=True):
    """One that runs."""

    config: Config
    pid: int
    tag: str | None = None


class ProcessList(Message, frozen=True, kw_only=True):
    """All that run."""

    processes: list[ProcessInfo] = []


class Began(Message, frozen=True, kw_only=True):
    """It is there."""

    pid: int = 0


class Output(Message, frozen=True, kw_only=True):
    """It has written."""

    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class Outcome(Message, frozen=True, kw_only=True):
    """`ExecResult` but for the exit code, for those who asked with `Exact`."""

    output: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    wall_s: float = 0.0


class Ended(Message, frozen=True, kw_only=True):
    """It is over."""

    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None
    etude: Outcome | None = None


class Event(Message, frozen=True, kw_only=True):
    """One of them."""

    start: Began | None = None
    data: Output | None = None
    end: Ended | None = None
    keepalive: dict[str, str] | None = None


class Happened(Message, frozen=True, kw_only=True):
    """What Start and Connect answer, again and again."""

    event: Event = Event()


# files


class Entry(Message, frozen=True, kw_only=True):
    """A file, folder or link."""

    name: str = ""
    type: str = "FILE_TYPE_UNSPECIFIED"
    path: str = ""
    size: str = "0"  # 64 bits are text in protobuf's JSON
    mode: int = 0
    permissions: str = ""
    owner: str = ""
    group: str = ""
    modified_time: str | None = None
    symlink_target: str | None = None
    is_symlink: bool = False


class WithEntry(Message, frozen=True, kw_only=True):
    """What Stat, MakeDir and Move answer."""

    entry: Entry = Entry()


class Path(Message, frozen=True, kw_only=True):
    """A request about one path: Stat, MakeDir, Remove."""

    path: str = ""


class Move(Message, frozen=True, kw_only=True):
    """Rename."""

    source: str = ""
    destination: str = ""


class ListDir(Message, frozen=True, kw_only=True):
    """What is in a folder, `depth` levels of it (0: one)."""

    path: str = ""
    depth: int = 0


class Entries(Message, frozen=True, kw_only=True):
    """It is this."""

    entries: list[Entry] = []


class Watch(Message, frozen=True, kw_only=True):
    """Tell what changes in a folder."""

    path: str = ""
    recursive: bool = False
    include_entry: bool = False


class Change(Message, frozen=True, kw_only=True):
    """Something did."""

    name: str = ""
    type: str = "EVENT_TYPE_UNSPECIFIED"
    entry: Entry | None = None


class Watched(Message, frozen=True, kw_only=True):
    """What WatchDir answers, again and again."""

    start: dict[str, str] | None = None
    filesystem: Change | None = None
    keepalive: dict[str, str] | None = None


class Watcher(Message, frozen=True, kw_only=True):
    """A watch that is asked, not listened to."""

    watcher_id: str = ""


class Changes(Message, frozen=True, kw_only=True):
    """Since it was asked last."""

    events: list[Change] = []


# machines


class Resource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all of REST have in common; the names are not quite regular."""


class NewSandbox(Resource, frozen=True, kw_only=True):
    """Make a machine from a template or a snapshot."""

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
    """Seconds from now until it ends; also what Connect and Resume are sent."""

    timeout: int = 300
    memory: bool | None = None


class Refresh(Resource, frozen=True, kw_only=True):
    """Live at least so long from now on."""

    duration: int = 60


class Fork(Resource, frozen=True, kw_only=True):
    """Make `count` of one."""

    timeout: int = 15
    count: int = 1


class Pause(Resource, frozen=True, kw_only=True):
    """Keep its state, end it; also what Snapshot is sent."""

    memory: bool | None = None
    name: str | None = None


class Sandbox(Resource, frozen=True, kw_only=True):
    """A machine, and how to reach it."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID", default="")
    client_id: str = msgspec.field(name="clientID", default="")
    envd_version: str = msgspec.field(name="envdVersion", default="")
    envd_access_token: str | None = msgspec.field(name="envdAccessToken", default=None)
    domain: str | None = None


class SandboxDetail(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """A machine, and how it is."""

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
    """A state that machines can be made from."""

    snapshot_id: str = msgspec.field(name="snapshotID")
    names: list[str] = []


class About(Resource, frozen=True, kw_only=True, omit_defaults=False):
    """Ours: what a server's machines are, as `RuntimeInfo` says it, and where their working directory is."""

    backend: str
    isolation: str
    users: list[str]
    images: bool = False
    forks_memory: bool = False
    whole_snapshots: bool = True
    notes: list[str] = []
