"""A root filesystem from Debian packages: their files alone, no script of theirs is run.

That needs no root rights and depends on nothing but the packages; the little that the scripts would have done for a
machine without a network and services is written here. /bin, /sbin and /lib are links into /usr, as Debian has them.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath

from etude.environments.images.limits import ImageLimits
from etude.environments.images.listing import Owner
from etude.environments.images.openat import open_in
from etude.environments.images.tree import Tree
from etude.environments.microvm.packages import Package, run
from etude.errors import MachineError

EPOCH = 1_700_000_000  # every file's time
WORK = "/workspace"
_CHUNK_BYTES = 1 << 20
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_LEFT_OUT = tuple(f"usr/share/{name}/" for name in ("doc", "man", "locale", "info", "lintian", "bug", "doc-base"))
_FOLDERS = {
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "root": 0o700, "home": 0o755,
    "var/tmp": 0o1777, "etc": 0o755, "mnt": 0o755, "opt": 0o755, "srv": 0o755, "usr/local/bin": 0o755,
    "var/lib": 0o755, "var/log": 0o755, "var/cache": 0o755, WORK[1:]: 0o755,
}  # fmt: skip
_FILES = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{WORK}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    "etc/hostname": "machine\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/machine-id": "",
}
_LINKS = {
    "usr/bin/python": "python3",
    "usr/bin/awk": "mawk",
    "usr/bin/pager": "less",
    "var/run": "/run",
    "etc/mtab": "/proc/self/mounts",
}


def unpack(packages: Iterable[Package], root: Path) -> None:
    """Fill a new folder with the packages' files and what every machine has. Links are followed inside of it only.
    `OSError` where the disk is full, `BadSource` for a package that has no root filesystem's files."""
    root.mkdir(parents=True)
    with Tree(root, ImageLimits(), keep_setuid=True) as tree:
        for name in _MERGED:
            tree.folder(f"usr/{name}")
            tree.link(name, f"usr/{name}", Owner(0o777))
        for package in packages:
            _unpack_one(package, tree)
        for name, mode in _FOLDERS.items():
            _folder(tree, name, mode)
        for name, text in _FILES.items():
            tree.file(name, Owner(0o644), (text.encode(),))
        for name, target in _LINKS.items():
            if not _is_link(tree, name):
                tree.link(name, target, Owner(0o777))


def _unpack_one(package: Package, tree: Tree) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", str(package.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar:
            for member in tar:
                name = placed(member.name)
                if name and not f"{name}/".startswith(_LEFT_OUT):
                    _put(tar, member, tree, name)
        unpacking.stdout.read()
    if unpacking.returncode:
        raise MachineError(
            f"{package.path.name} cannot be unpacked", "dpkg-deb failed", hint="delete it, and run again"
        )


def placed(name: str) -> str:
    """Where a package's file goes. "" for the root itself, and for a name that would leave it.

    >>> placed("./bin/sh"), placed("./usr/bin/git"), placed("./")
    ('usr/bin/sh', 'usr/bin/git', '')
    """
    parts = [part for part in PurePosixPath(name).parts if part not in (".", "/")]
    if not parts or ".." in parts:
        return ""
    return "/".join(["usr", *parts] if parts[0] in _MERGED else parts)


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Tree, name: str) -> None:
    if member.isdir():
        _folder(tree, name, member.mode)
    elif member.issym():
        tree.link(name, member.linkname, Owner(0o777))
    elif member.islnk():
        tree.hard_link(name, placed(member.linkname))
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        tree.file(name, Owner(member.mode), iter(partial(content.read, _CHUNK_BYTES), b""))


def _folder(tree: Tree, name: str, mode: int) -> None:
    """Make a folder, but keep a link that leads to one inside, as dpkg does."""
    if not (_is_link(tree, name) and tree.is_folder(name)):
        tree.folder(name, Owner(mode))


def _is_link(tree: Tree, name: str) -> bool:
    try:
        fd = open_in(tree.root, name, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return stat.S_ISLNK(os.fstat(fd).st_mode)
    finally:
        os.close(fd)


def finish(root: Path) -> None:
    """What is quicker done once: the cache of libraries and Python's compiled modules, the same bytes each time."""
    changing_root = ["chroot", str(root)] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot", str(root)]
    env = {"PATH": "/usr/bin:/usr/sbin", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    run([*changing_root, "ldconfig"], "ldconfig in the image", deadline_s=60.0, env=env)
    compiling = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/usr/lib/python3"]
    folders = [f"/usr/lib/{path.name}" for path in sorted((root / "usr/lib").glob("python3.*"))]
    run([*changing_root, *compiling, *folders], "compiling Python's modules", deadline_s=600.0, env=env)
    with Tree(root, ImageLimits(), keep_setuid=True) as tree:
        tree.remove("var/cache/ldconfig")
    for folder, folders_in, names in os.walk(root, topdown=False):
        for name in [*names, *folders_in]:
            os.utime(os.path.join(folder, name), (EPOCH, EPOCH), follow_symlinks=False)
    os.utime(root, (EPOCH, EPOCH))
