"""Read the templates of a server from a file: what sandboxes can be created from, by name.

The file is TOML, with one table for each template. Paths are relative to the file:

    [python]
    files = "skeleton/"        # a folder that is copied to the working directory
    image = "9f3c..."          # the digest of an image, if the backend has images
    workdir = "/testbed"       # of the image; env and user likewise
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from etude.environments.remote.sandboxes import Template
from etude.errors import ConfigError
from etude.records.image import Image

_MAX_BYTES = 256 << 20


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    files: str = ""
    image: str = ""
    workdir: str = "/workspace"
    env: dict[str, str] = {}
    user: str = ""


def read_templates(path: Path) -> dict[str, Template]:
    """Read a file of templates, including the folders that it names; return the templates by name.

    Raises `ConfigError` if the file is invalid or a folder is missing or too large."""
    try:
        rows = msgspec.convert(tomllib.loads(path.read_text()), dict[str, _Row])
        return {name: _template(path.parent, row) for name, row in rows.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        hint = "see etude.environments.remote.templates"
        raise ConfigError(f"{path} is not a valid file of templates", str(error), hint=hint) from None


def _template(base: Path, row: _Row) -> Template:
    files = _folder(base / row.files) if row.files else {}
    image = Image(digest=row.image, workdir=row.workdir, env=row.env, user=row.user) if row.image else None
    return Template(files, image)


def _folder(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", hint="`files` must be a folder, relative to the file of templates"
        )
    found, bytes_left = dict[str, bytes](), _MAX_BYTES
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        bytes_left -= path.stat().st_size
        if bytes_left < 0:
            raise ConfigError(f"{folder} has more than {_MAX_BYTES} bytes", hint="put large trees into an image")
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found
