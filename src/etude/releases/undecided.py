"""What keeps the gate of a release from being decided, from the results of evaluations that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.errors import EtudeError, StoreError
from etude.evals.records import EvalRecord, read_record
from etude.evals.suites import read_suite
from etude.records.completion import Version
from etude.releases.gate import cost_rise, is_of, not_comparable
from etude.releases.settings import SuiteGate
from etude.releases.states import Release


class Missing(NamedTuple):
    """A check of a gate that cannot be made now: its name, why, and what to do."""

    check: str
    why: str
    hint: str


def missing_checks(release: Release, folders: Sequence[Path]) -> list[Missing]:
    """Return the checks of a release's gate that cannot be made with the results in these folders of `etude eval`.

    Empty: every result is there, and the gate can be decided. Where parity is required it is always among them, since
    its result is in no folder."""
    found = [one for gate in release.settings.gate for one in _of_suite(gate, release, folders)]
    if release.settings.parity:
        at = _checkpoint(release, release.candidate)
        hint = f"etude parity {at} --json > parity.json, then etude release gate ... --parity parity.json"
        found.append(Missing("parity", "the candidate needs a passed comparison of engine and learner", hint))
    return found


def _of_suite(gate: SuiteGate, release: Release, folders: Sequence[Path]) -> Iterator[Missing]:
    try:
        name = read_suite(gate.suite).name
    except EtudeError as error:
        hint = "restore the file; or end the release (etude release rollback --reason TEXT), and begin it with others"
        yield Missing(gate.name, f"{error.what}: {error.facts}", hint)
        return
    records, damaged = list[EvalRecord](), list[str]()
    for path in [path for folder in folders for path in sorted((folder / name).glob("*.json"))]:
        try:
            records.append(read_record(path))
        except StoreError as error:
            damaged.append(error.what)
    priced = "" if gate.cost_rise is None else " --prices FILE"
    both = []
    for version, role in ((release.candidate, "candidate"), (release.stable, "stable version")):
        both.append([one for one in records if is_of(one, version)])
        if not both[-1]:
            why = f"no result of the {role} {version} in {' or '.join(map(str, folders))}"
            why += f" ({'; '.join(damaged)})" if damaged else ""
            yield Missing(
                gate.name, why, f"etude eval {gate.suite} --checkpoint {_checkpoint(release, version)}{priced}"
            )
    pairs = [(new, old) for new in both[0] for old in both[1]]
    wrong = [not_comparable(new, old, release.candidate, release.stable) for new, old in pairs]
    if pairs and all(wrong):
        yield Missing(
            gate.name, wrong[0], f"evaluate both again: etude eval {gate.suite} --checkpoint CHECKPOINT{priced}"
        )
    comparable = [pair for pair, problem in zip(pairs, wrong, strict=True) if not problem]
    if comparable and gate.cost_rise is not None and all(cost_rise(*pair) is None for pair in comparable):
        why = f"the cost per task is unknown, and cost_rise = {gate.cost_rise:g} compares it"
        hint = "evaluate both again with a table of prices that has the model: etude eval ... --prices FILE"
        yield Missing(gate.name, why, f"{hint}; the endless loop takes it from prices in [loop] of its --settings")


def _checkpoint(release: Release, version: Version) -> str:
    """Return the path of a version's checkpoint, for a command; where there is none, what to give instead."""
    run, name = Path(release.location).parent, f"step-{version.step:06d}"
    if (run / "checkpoints" / name).is_dir():
        return str(run / "checkpoints" / name)
    return f"CHECKPOINT (one of {version}: its run keeps it as checkpoints/{name} while it is needed)"
