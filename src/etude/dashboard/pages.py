"""Self-contained HTML pages: rendered from a template of this folder, and written all or nothing."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from etude.errors import StoreError
from etude.file_checksums import sealed_page


def render(template: str, **values: object) -> str:
    """Return a page from a template of this folder, with the stylesheet of the report as `css`."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_resource(template)).render(css=Markup(_resource("report.css")), **values)


def write_page(path: Path, html: str, *, hint: str) -> Path:
    """Write a page with its checksum to `path`, all or nothing, and return `path`.

    Raises `StoreError` with `hint` if it cannot be written."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(sealed_page(html))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written", str(error), hint=hint) from error
    return path


def _resource(name: str) -> str:
    return (files("etude.dashboard") / name).read_text(encoding="utf-8")
