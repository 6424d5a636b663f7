"""The file ``etude.json`` of an exported checkpoint: what the gateway must know of the run that trained it
(docs/formats/run.md)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from etude.capture import SummaryLimits
from etude.errors import CheckpointError
from etude.file_checksums import verify_files
from etude.run import RunFolder

FILE = "etude.json"
FORMAT = 1


class ExportedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of ``etude.json``. `summaries`: the limits with which conversations were summarised in training."""

    format: int = FORMAT
    summaries: SummaryLimits


def summaries_of_run(run: RunFolder) -> SummaryLimits | None:
    """Return the limits with which a run summarises its conversations; None: it does not summarise them.

    Raises `RunError` for a damaged config."""
    if run.setting("harness.summary_tokens") in ("", "0"):
        return None
    return SummaryLimits(
        context_tokens=int(run.setting("harness.context_tokens")),
        summary_tokens=int(run.setting("harness.summary_tokens")),
        turn_tokens=int(run.setting("harness.turn_tokens")),
        max_turns=int(run.setting("harness.max_turns")),
        temperature=float(run.setting("rl.temperature")),
    )


def settings_files(summaries: SummaryLimits | None) -> dict[str, str]:
    """Return the files to add to an exported checkpoint, as name → content; {} without summaries."""
    if summaries is None:
        return {}
    data = msgspec.json.encode(ExportedSettings(summaries=summaries))
    return {FILE: msgspec.json.format(data, indent=2).decode() + "\n"}


def summaries_of_checkpoint(folder: Path) -> SummaryLimits | None:
    """Read from a checkpoint's directory the limits with which conversations were summarised; None: it has no such
    file.

    Raises `CheckpointError` for a damaged file, and for one that a later version of etude wrote."""
    if not (folder / FILE).is_file():
        return None
    hint = "export the checkpoint again, or remove the file to serve it without summaries"
    verify_files(folder, [FILE], kind=CheckpointError)
    try:
        found = msgspec.json.decode((folder / FILE).read_bytes(), type=ExportedSettings)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{folder / FILE} cannot be read", str(error), hint=hint) from None
    if found.format != FORMAT:
        facts = f"this version of etude supports format {FORMAT}"
        raise CheckpointError(f"{folder / FILE} has format {found.format}", facts, hint=hint)
    return found.summaries
