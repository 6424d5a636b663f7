"""``etude init``: a folder with a config and tasks, to run at once and to change."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from etude.errors import InputError, NoCheckpoint
from etude.tasks.starting import write_examples

_MODEL_BEGIN, _MODEL_END = "# [model] begin\n", "# [model] end\n"


def init(args: argparse.Namespace) -> int:
    """Write DIR/config.toml and DIR/tasks/. With `--start` the run begins with that checkpoint, which must be
    of an architecture that is computed here."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists", "nothing is overwritten", hint="name a new folder")
    start: Path | None = args.start
    if start is not None and not (start / "config.json").is_file():
        raise NoCheckpoint(f"no checkpoint at {start}", "it has no config.json", hint="give a Hugging Face directory")
    if start is not None:
        from etude.loop.limits import start_model_config  # only here: a light install has no tokenisers

        start_model_config(start)
    text = resources.files("etude.cli").joinpath("init.toml").read_text()
    if start is None:
        text = text.replace(_MODEL_BEGIN, "").replace(_MODEL_END, "")
    else:
        before, _, rest = text.partition(_MODEL_BEGIN)
        text = f'start = "{start.resolve()}"\n\n'.join((before, rest.partition(_MODEL_END)[2].lstrip("\n")))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        hint = "name a place where folders can be made: a part of its path is no folder"
        raise InputError(f"{folder} cannot be made", error.strerror or "", hint=hint) from None
    count = write_examples(folder / "tasks")
    (folder / "config.toml").write_text(text)
    print(f"{folder}/config.toml and {count} tasks in {folder}/tasks: change both as you like, then")
    print(f"  cd {folder} && etude run config.toml")
    return 0
