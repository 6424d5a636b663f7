"""The root folder, the mounts and the config.json (OCI runtime specification) of a gVisor sandbox.

Without an image, the root is a skeleton of folders and small files in /etc; the host's toolchain is mounted on it
read-only, as in namespace machines. With an image, its root is read-only too; writes go to the sandbox's memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.environments.config import MachineLimits
from etude.environments.images.directory import copy_one, open_folder
from etude.environments.images.limits import ImageLimits, too_large
from etude.environments.images.listing import Owner, walk
from etude.environments.images.openat import open_in
from etude.environments.images.tree import Tree

WORK = "/workspace"
PATH = "/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT = "/.agent"
_SYSTEM = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share",
           "/etc/alternatives")  # fmt: skip
_MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_FOLDERS = ("dev", "proc", "tmp", "root", "run", "etc", "var", "opt/python/bin", WORK[1:])
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{WORK}:/bin/sh\n",
    "etc/group": "root:x:0:\nuser:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    AGENT[1:]: "",
}
_CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
    "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_SETFCAP", "CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SYS_TIME",
]  # fmt: skip
"""Capabilities of the agent in the sandbox; its commands keep few or none of them."""
_UNLIMITED = (1 << 63) - 1
_MOUNT_POINTS = {"proc": 0o555, "dev": 0o755, "tmp": 0o1777, "sys": 0o555}  # mount points, or folders that stay empty
_USERS_BYTES = 4 << 20  # of an image's /etc/passwd or /etc/group


def make_root(folder: Path) -> list[dict[str, Any]]:
    """Make the root for sandboxes without an image in an empty folder. Returns its mounts as entries of config.json."""
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, text in _FILES.items():
        (folder / name).write_text(text)
    (folder / "var/tmp").symlink_to("/tmp")
    prefix, python = os.path.realpath(sys.base_prefix), os.path.realpath(sys.executable)
    sources = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    if not any(f"{prefix}/".startswith(f"{path}/") for path in ("/usr", *sources)):
        sources.append(prefix)
    for path in _MERGED:
        if os.path.islink(path):
            (folder / path[1:]).symlink_to(os.readlink(path))
        elif os.path.isdir(path):
            sources.append(path)
    for path in sources:
        (folder / path[1:]).mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3"):
        (folder / "opt/python/bin" / name).symlink_to(python)
    return [_mount(path, "bind", path, "rbind", "ro") for path in sources]


def make_image_root(image: Path, folder: Path) -> list[dict[str, Any]]:
    """Make the root for sandboxes of an image in an empty folder. Returns its mounts as entries of config.json.

    `image`: the folder with the image's root filesystem. It cannot be the root itself, as runsc would create mount
    points in it. /etc is a copy with the machine's users added. The image's links are not trusted: they are copied, and
    never followed on the host.
    """
    mounts = []
    with open_folder(image) as source, Tree(folder, ImageLimits(), keep_setuid=True) as tree:
        for name in sorted(os.listdir(source)):
            found = os.lstat(name, dir_fd=source)
            if name in _MOUNT_POINTS or name in ("etc", AGENT[1:]) or not _is_supported(found):
                continue
            owner = _owner_of(found)
            if stat.S_ISDIR(found.st_mode):
                tree.folder(name, owner)
                mounts.append(_mount(f"/{name}", "bind", str(image / name), "rbind", "rw"))
            else:
                copy_one(found, source, name, tree, name, owner)
        for name, mode in _MOUNT_POINTS.items():
            tree.folder(name, Owner(mode))
        tree.file(AGENT[1:], Owner(0o755), ())
        _make_etc(source, tree)
    return mounts


def _make_etc(image: int, tree: Tree) -> None:
    """Copy /etc of an open image, following links inside the image only, and add the machine's users."""
    tree.folder("etc")
    try:
        etc = open_in(image, "etc", os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        etc = -1
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        etc = -1
    if etc >= 0:
        try:
            for path, found, parent, name in walk(etc):
                if _is_supported(found):
                    copy_one(found, parent, name, tree, f"etc/{path}", _owner_of(found))
        finally:
            os.close(etc)
    for name in ("passwd", "group"):
        text = _text_in(image, f"etc/{name}")
        known = [line.split(":")[0] for line in text.splitlines()]
        lines = [line for line in _FILES[f"etc/{name}"].splitlines() if line.split(":")[0] not in known]
        content = "\n".join([text.rstrip("\n"), *lines]).lstrip("\n") + "\n"
        tree.file(f"etc/{name}", Owner(0o644), (content.encode(errors="surrogateescape"),))


def _text_in(image: int, path: str) -> str:
    """Text of a regular file in an open image, following links inside the image only; "" if it is not a regular
    file. Raises `BadSource` beyond `_USERS_BYTES`."""
    try:
        fd = open_in(image, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return ""
        if found.st_size > _USERS_BYTES:
            raise too_large(f"/{path} has {found.st_size} bytes, at most {_USERS_BYTES}", "file_bytes")
        return os.pread(fd, _USERS_BYTES, 0).decode(errors="surrogateescape")
    finally:
        os.close(fd)


def _owner_of(found: os.stat_result) -> Owner:
    return Owner(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def _is_supported(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)


def config(
    root: Path,
    mounts: Sequence[dict[str, Any]],
    agent: Path,
    limits: MachineLimits,
    *,
    host_name: str,
    work: str,
    user: str,
    own_root: bool,
) -> bytes:
    """Return the content of a sandbox's config.json.

    `root`, `mounts`: the root folder, and the mounts that `make_root` or `make_image_root` returned for it. `agent`:
    path of the agent's program. `work`: the working directory. `user`: the default user of commands. `limits`,
    `host_name`: limits and host name of the machine. `own_root`: whether `make_root` made the root; it is then
    read-only, with the working directory in memory.
    """
    arguments = ["--stdio", "--work", work, "--user", user, "--path", PATH]
    for name, value in (("nproc", limits.processes), ("nofile", limits.open_files), ("as", limits.address_bytes)):
        arguments += ["--limit", f"{name}={value}"]
    all_mounts = [_mount("/proc", "proc", "proc"), _mount("/dev", "tmpfs", "tmpfs")]
    all_mounts.append(_mount("/tmp", "tmpfs", "tmpfs", "mode=1777", f"size={limits.tmp_bytes}"))
    if own_root:
        owner = ("mode=755", "uid=1000", "gid=1000", f"size={limits.work_bytes}")
        all_mounts.append(_mount(work, "tmpfs", "tmpfs", *owner))
    all_mounts += [*mounts, _mount(AGENT, "bind", str(agent), "bind", "ro")]
    unlimited = {"type": "RLIMIT_CORE", "soft": _UNLIMITED, "hard": _UNLIMITED}  # the agent uses this limit as a mark
    process = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0},
        "args": [AGENT, *arguments],
        "env": [f"PATH={PATH}"],
        "cwd": "/",
        "capabilities": {kind: _CAPABILITIES for kind in ("bounding", "effective", "inheritable", "permitted")},
        "rlimits": [unlimited],
        "noNewPrivileges": True,
    }
    namespaces = [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")]
    return json.dumps(
        {
            "ociVersion": "1.0.0",
            "process": process,
            "root": {"path": str(root), "readonly": own_root},
            "hostname": host_name,
            "mounts": all_mounts,
            "linux": {"namespaces": namespaces},
        }
    ).encode()


def _mount(to: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": to, "type": kind, "source": source, "options": list(options)}
