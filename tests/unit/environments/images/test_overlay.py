"""The overlay of a machine on an image: writes stay in the upper layer, owners are mapped, the host is out of reach."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.environments.images.archives import files_of

from etude.environments.images.decompression import decompressed
from etude.environments.images.layers import apply_layer, write_layer
from etude.environments.images.limits import ImageLimits
from etude.environments.images.tree import Tree

PROGRAM = """
import json, os, sys
image, base, mode, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
from etude.environments.namespace.guest import overlay
from etude.environments.namespace.guest import syscalls as sys_
from etude.environments.images.layers import write_layer
uid, gid = os.geteuid(), os.getegid()
if base is None:
    sys_.unshare(sys_.CLONE_NEWUSER | sys_.CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        open(f"/proc/self/{name}", "w").write(text)
else:
    sys_.unshare(sys_.CLONE_NEWPID)
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
overlay.enter_frame(image)
roots = overlay.Roots(base, overlay.Size(1 << 20, 100, 1 << 20, 100, 1 << 20, 100), "/work/dir", 0, 0)
if mode:
    roots.mode = mode
roots.prepare(3, roots.users_of)
sys_.unshare(sys_.CLONE_NEWNS)
opened = roots.make(3)
first = roots.first(3)
see = lambda path: [os.stat(path).st_uid - first, oct(os.stat(path).st_mode & 0o7777)]
facts = {"mode": roots.mode, "top": sorted(os.listdir("/")), "tool": see("/bin/tool"), "work": see("/work/dir")}
facts["dev"] = sorted(os.listdir("/dev"))
facts["mounts"] = [line.split()[1] for line in open("/proc/mounts")]
with sys_.acting_on_files_as(first or None):
    open("/bin/tool", "a").write("+more")
    os.remove("/etc/gone")
    os.rename("/etc/moved", "/etc/there")
    open("/work/dir/new", "w").write("new")
    try:
        open("/work/dir/much", "wb").write(bytes(4 << 20))
    except OSError as error:
        facts["full"] = error.errno
    os.remove("/work/dir/much")
with os.fdopen(out, "wb") as file:
    write_layer(opened.upper, file.write, ids=lambda found: found - first, whole=roots.mode == "copied")
print(json.dumps(facts))
"""


def image_at(tmp_path: Path) -> Path:
    image = tmp_path / "image"
    for path, text in {"bin/tool": "tool", "etc/gone": "1", "etc/moved": "2", "etc/kept": "3"}.items():
        (image / path).parent.mkdir(parents=True, exist_ok=True)
        (image / path).write_text(text)
    image.chmod(0o755)
    for link in ("proc", "dev"):
        (image / link).symlink_to("/etc/" if link == "proc" else "nowhere")
    (image / "proc").unlink()
    (image / "dev").unlink()
    return image


def made(tmp_path: Path, image: Path, base: int | None, mode: str = "") -> tuple[dict, bytes]:
    """Return what the machine saw, and the layer of its changes."""
    layer = tmp_path / "layer"
    with open(layer, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(image), json.dumps(base), mode, str(out.fileno())],
            pass_fds=[out.fileno()], capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    if "unshare: Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), layer.read_bytes()


MODES = [("idmapped", 1_900_000_000), ("overlay", None), ("copied", 1_900_000_000), ("copied", None)]


@pytest.mark.parametrize(("mode", "base"), MODES)
def test_a_machine_writes_into_its_own_root_and_not_into_the_image(tmp_path, mode, base):
    if base is not None and os.geteuid() != 0:
        pytest.skip("users of one's own need root")
    image = image_at(tmp_path)
    before = files_of(image)
    facts, layer = made(tmp_path, image, base, mode)
    assert facts["mode"] == mode
    assert facts["top"] == ["bin", "dev", "etc", "proc", "tmp", "work"]
    assert facts["tool"] == [0, "0o644"]
    assert facts["work"][0] == 0
    assert {"null", "urandom", "fd", "shm"} <= set(facts["dev"])
    assert set(facts["mounts"]) == {
        "/",
        "/proc",
        "/dev",
        "/tmp",
        *(f"/dev/{d}" for d in ("null", "zero", "full", "random", "urandom")),
    }
    assert facts["full"] == 28
    assert files_of(image) == before
    again = tmp_path / "again"
    again.mkdir()
    limits = ImageLimits()
    with Tree(again, limits) as tree:
        out = io.BytesIO()
        folder = os.open(image, os.O_RDONLY)
        write_layer(folder, out.write, ids=lambda found: 0)
        os.close(folder)
        apply_layer(decompressed(io.BytesIO(out.getvalue()), limits), tree)
        apply_layer(decompressed(io.BytesIO(layer), limits), tree)
    found = {path: text for path, text in files_of(again).items() if text != "/"}
    assert found == {"bin/tool": "tool+more", "etc/kept": "3", "etc/there": "2", "work/dir/new": "new"}
