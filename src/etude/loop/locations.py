"""Where a run stores its ledger, weights and traces: in its folder, on a server, or in a bucket.

Only these settings of the config are read, so that it works with runs of earlier versions whose other settings no
longer exist. In a bucket each run has its own prefix, its id, so that runs can share a bucket."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from etude.errors import InputError, StoreError
from etude.run import RunFolder
from etude.seams import BlobStore
from etude.stores import open_store
from etude.weights.chain.history import head

if TYPE_CHECKING:
    from etude.experience.ledger import Ledger
    from etude.experience.rollout_files import RolloutFiles
    from etude.experience.traces import TraceFolder

FOLDER_POLL_S, BUCKET_POLL_S = 0.1, 0.5


def ledger_location(run: RunFolder) -> Path | str:
    """Return the location of a run's ledger (its database of rollouts), in the form that `Ledger` accepts: a path or a
    URL."""
    server = run.setting("experience.ledger")
    return f"{server}#{run.identity()['run_id']}" if server else run / "ledger.sqlite"


def read_ledger(run: RunFolder, *, immutable: bool = False) -> Ledger:
    """Open a run's ledger (its database of rollouts) for reading. Raises `NoLedger`, `LedgerError`, `StoreError`.

    The run may write it meanwhile. `immutable`: the caller promises that nothing writes it."""
    from etude.experience.ledger import Ledger  # not needed when only weights are read

    return Ledger.open_readonly(ledger_location(run), immutable=immutable)


def weights_location(run: RunFolder) -> Path | str:
    """Return the location of a run's published weights, in the form that `open_store` accepts: a path or a URL."""
    return _location(run, "weights")


def poll_arguments(place: Path | str) -> list[str]:
    """Return the command-line arguments that set how often an engine polls `place` for new weights.

    A bucket is polled less often than a directory, since each request costs money."""
    return [] if isinstance(place, Path) else ["--poll-s", str(BUCKET_POLL_S)]


def poll_s(place: Path | str) -> float:
    """Return the seconds between two looks of a gateway at the versions in `place`. It is longer for a bucket,
    where each request costs money."""
    return FOLDER_POLL_S if isinstance(place, Path) else BUCKET_POLL_S


def weights_store(run: RunFolder, *, readonly: bool = False) -> BlobStore:
    """Open the store of a run's published weights.

    With `readonly` nothing is created or written, and `InputError` is raised when the store does not exist."""
    place = weights_location(run)
    if readonly and isinstance(place, Path) and not place.is_dir():
        hint = "RL publishes the first version when it begins; if there were versions, copy the folder back"
        raise InputError(f"{run.path} has no weights", f"{place} does not exist", hint=hint)
    return open_store(place, readonly=readonly)


def has_published(run: RunFolder) -> bool:
    """Return whether the run has published weights. Creates nothing."""
    place = weights_location(run)
    return (
        place.joinpath("pointers", "policy").exists()
        if isinstance(place, Path)
        else bool(head(open_store(place, readonly=True), "policy"))
    )


def traces_folder(run: RunFolder) -> TraceFolder:
    """Open the folder or store of a run's traces, the records of the batches of its steps."""
    place = _location(run, "traces")
    return place if isinstance(place, Path) else open_store(place)


def rollout_files(run: RunFolder) -> RolloutFiles:
    """Open the files of finished rollouts that may still be trained on. They are always in the run folder."""
    from etude.experience.rollout_files import RolloutFiles

    return RolloutFiles(run / "rollouts")


def _location(run: RunFolder, name: str) -> Path | str:
    url = run.setting(f"stores.{name}")
    return f"{url.rstrip('/')}/{run.identity()['run_id']}/{name}" if url else run / name


def check_store(url: str, log: Callable[[str], None] = lambda _: None) -> None:
    """Check that a run can use a store: write, read, list and delete a few bytes. Raises `StoreError`.

    A directory that does not exist is not created, since it may be a typo: `log` is called with a line on it."""
    folder = Path(unquote(url.removeprefix("file://"))) if url.startswith("file:///") else None
    if folder is not None and not folder.exists():
        parent = next(path for path in folder.parents if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise StoreError(f"{url} cannot be created", f"{parent} is not writable", hint="use another store")
        log(f"{folder} does not exist yet: the run will create it")
        return
    store, key = open_store(url), f"preflight/{secrets.token_hex(8)}"
    store.put(key, b"a run may write here")
    try:
        if store.get(key) != b"a run may write here" or store.list("preflight/").count(key) != 1:
            raise StoreError(f"{url} does not return what was written to it", key, hint="use another store")
    finally:
        store.delete(key)
