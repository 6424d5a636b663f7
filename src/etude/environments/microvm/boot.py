"""Build the initramfs of a guest: virtio modules, busybox and the guest agent.

Its init program loads the modules, mounts the disk and executes the agent. The archive is built at each boot, without
compression, which takes a millisecond; so the agent is always the installed one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from etude.environments.microvm.image import BaseImage

CONSOLE_MARK = b"guest is up"
_INIT = """#!/busybox sh
export PATH=/
b=/busybox
fail() {{ echo "etude: $1" >/dev/console; $b poweroff -f; }}
$b mkdir -p /dev /new
$b mount -t devtmpfs dev /dev
for module in {modules}; do $b insmod /modules/$module.ko || fail "no module $module"; done
tries=0
until [ -b /dev/vda ] && port=$(echo /dev/vport*p1) && [ -c "$port" ]; do
    $b usleep 5000
    tries=$((tries + 1))
    [ $tries -lt 2000 ] || fail "no disk, or no port"
done
$b mount -t ext4 -o noatime,discard /dev/vda /new || fail "the disk cannot be mounted"
$b mkdir -p /new/dev /new/proc /new/sys /new/run /new/tmp /new/etc
$b mount --move /dev /new/dev
$b mount -t tmpfs -o mode=700,nosuid,nodev run /new/run
$b cp /agent /new/run/agent
$b mkdir -p /proc
$b mount -t proc proc /proc && echo 4096 >/proc/sys/kernel/pid_max && $b umount /proc
{prepare}
exec $b switch_root /new /run/agent --init --port $port {arguments}
"""
_PROBE_INIT = f"""#!/busybox sh
/busybox mkdir -p /dev
/busybox mount -t devtmpfs dev /dev
echo {CONSOLE_MARK.decode()} >/dev/ttyS0
/busybox poweroff -f
"""


def initial_filesystem(image: BaseImage, agent: Path, arguments: Sequence[str], *, prepare: str) -> bytes:
    """Build an initramfs (cpio, newc) that boots a disk with the agent as its first process.

    `agent`: path of the agent's program. `arguments`: its command-line arguments. `prepare`: a busybox shell script
    (busybox is ``$b``) that runs after the disk is mounted at ``/new``.
    """
    modules = [(f"modules/{path.name}", 0o100644, path.read_bytes()) for path in image.modules]
    names = " ".join(path.stem for path in image.modules)
    init = _INIT.format(modules=names, arguments=shlex.join(arguments), prepare=prepare)
    return archive(
        [
            ("busybox", 0o100755, image.busybox.read_bytes()),
            ("agent", 0o100755, agent.read_bytes()),
            ("init", 0o100755, init.encode()),
            ("modules", 0o040755, b""),
            *modules,
        ]
    )


def probing_filesystem(image: BaseImage) -> bytes:
    """Build an initramfs that prints `CONSOLE_MARK` on the serial console and powers off."""
    return archive([("busybox", 0o100755, image.busybox.read_bytes()), ("init", 0o100755, _PROBE_INIT.encode())])


def archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Build a cpio archive in the newc format of the Linux kernel, with all files owned by root.

    `entries`: (path, mode with file type, content) of each file or folder.

    >>> archive([("init", 0o100755, b"x")])[:6]
    b'070701'
    """
    parts: list[bytes] = []
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        parts += (head, bytes(-len(head) % 4), content, bytes(-len(content) % 4))
    return b"".join(parts)
