"""Sources of images for tests: archives and repositories, not written by the code under test."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

GIT_WHO = {
    **{
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "a"), ("EMAIL", "a@b"))
    },
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


def tar_of(entries: Sequence[tuple[str, bytes | str | None] | tarfile.TarInfo]) -> bytes:
    """Make a tar archive with Python's tarfile: bytes are files, None is a folder, a text is a link target."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
                continue
            path, content = entry
            info = tarfile.TarInfo(path)
            info.mode = 0o755 if content is None else 0o644
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def special(path: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """An entry that is not a regular file."""
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.devmajor, info.devminor = kind, target, 1, 3
    return info


def oci_layout(folder: Path, layers: Sequence[bytes], config: Mapping[str, object] | None = None) -> Path:
    """Make an OCI image layout with these layers (tar archives); every second one is compressed with gzip."""

    def put(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (folder / "blobs" / "sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": "application/octet-stream"}

    (folder / "blobs" / "sha256").mkdir(parents=True)
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    packed = [gzip.compress(layer) if i % 2 else layer for i, layer in enumerate(layers)]
    whole = {"architecture": "any", "rootfs": {"type": "layers", "diff_ids": diff_ids}, "config": config or {}}
    manifest = {
        "schemaVersion": 2,
        "config": put(json.dumps(whole).encode()),
        "layers": [put(layer) for layer in packed],
    }
    (folder / "index.json").write_text(
        json.dumps({"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode())]})
    )
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def repository(folder: Path, states: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Make a repository with a commit for each state. Returns the commits."""
    folder.mkdir()
    run(folder, "init", "-q", "-b", "main")
    commits = []
    for number, state in enumerate(states):
        for path, data in state.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        run(folder, "add", "-A")
        run(folder, "commit", "-q", "-m", f"state {number}")
        commits.append(run(folder, "rev-parse", "HEAD").strip())
    return commits


def run(folder: Path, *words: str) -> str:
    return subprocess.check_output(["git", "-C", str(folder), *words], env={**os.environ, **GIT_WHO}, text=True)


def files_of(root: Path) -> dict[str, str]:
    """The content of a folder: a file's text, a link's target after "->", "/" for a folder."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"->{os.readlink(path)}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text(errors="replace")
    return found
