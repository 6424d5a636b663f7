"""A folder of consent, keys and captured records; erasing a subject."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType

import msgspec

from etude.privacy.consent import ConsentStore, Level
from etude.privacy.database import delete_subject, subjects_in
from etude.privacy.keys import KeyStore
from etude.privacy.records import Captured, RecordStore
from etude.privacy.subjects import Subject, SubjectDigests

OUTCOMES = "outcomes"
"""The table of an attached file of releases. Its rows have no names: they are made unlinkable, not deleted."""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an erasure.

    - `num_keys`: the keys that were destroyed.
    - `records`: the records that were deleted.
    - `rollouts`: the ids of all rollouts that were made from records of the subject, including records that were
      deleted earlier.
    - `attached`: the number of rows that were deleted from each attached file, such as a file of signals.
    - `unlinked`: the number of outcomes in each attached file of releases that were made unlinkable.
    - `missing`: attached files that do not exist any more, so that their rows were not deleted or unlinked.
    - `found`: whether anything was known of the subject before: a level that was set, a key, a record, a rollout or a
      row of an attached file. False for a misspelt name."""

    num_keys: int
    records: list[Captured]
    rollouts: list[str]
    attached: dict[Path, int]
    unlinked: dict[Path, int]
    missing: list[Path]
    found: bool


class PrivacyFolder:
    """The folder with the consent levels (`consent.sqlite`), keys (`keys/`, or another folder) and captured records
    (`records.sqlite`) of one service.

    Missing files are created. Close it, or use it in a `with` block. Raises `PrivacyError` if a file cannot be used."""

    def __init__(self, path: Path, *, keys: Path | None = None) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        consent = path / "consent.sqlite"
        self.keys = KeyStore(keys or path / "keys", create=not consent.exists())
        self.consent = ConsentStore(consent, self.keys)
        try:
            self.records = RecordStore(path / "records.sqlite", self.keys)
        except BaseException:
            self.consent.close()
            raise

    def usable(self, record_ids: Collection[str], level: Level) -> set[str]:
        """Return the ids of those records that may be used for `level` now.

        Such a record exists, was captured at this level or a higher one, and its subject still allows the level. Call
        it when a training batch is formed, and again before the batch is committed."""
        return self.allowed(self.records.find(record_ids), level)

    def allowed(self, records: Iterable[Captured], level: Level) -> set[str]:
        """Return the ids of those of `records` that may be used for `level` now.

        It does not check that they still exist: read them just before, or call `usable`."""
        found = [one for one in records if one.level >= level]
        subjects = {one.names for one in found}
        allowing = {one for one in subjects if self.consent.level_of(one) >= level and self.keys.find(one) is not None}
        return {one.record_id for one in found if one.names in allowing}

    def erase(self, subject: Subject, *, unlink: Callable[[Path, Collection[str]], int] | None = None) -> Erasure:
        """Destroy the key of a subject, set its level to off, and delete its records and its rows in attached files.

        `unlink`: makes the outcomes of subjects, by their digests, in a file of releases unlinkable
        (`Releases.unlink`), and returns how many they are. None: attached files of releases are left as they are.

        For an organisation, all its users are erased. The key is destroyed first, which needs no disk space: without it
        the records are unreadable. After an error or a kill, call it again. Raises `DeadlineExceeded` if another
        process uses the keys for too long, and `PrivacyError` for a file that cannot be used."""
        names = self.keys.names(subject)
        with self.keys.lock():
            known = self.consent.has_levels(names)
            num_keys = self.keys.destroy(names)
            self.consent.set_named(names, Level.OFF, name="" if subject.user else subject.organisation)
            unlinked = {} if unlink is None else self._unlink(names, unlink)
            records = self.records.of(names)
            self.records.delete(names, num_keys=num_keys)
            attached, missing = dict[Path, int](), list[Path]()
            for path, table in self.records.attached():
                if not path.is_file():
                    missing.append(path)
                elif table != OUTCOMES:
                    attached[path] = attached.get(path, 0) + delete_subject(path, table, names)
        rollouts = self.records.rollouts_of(names)
        return Erasure(
            num_keys=num_keys,
            records=records,
            rollouts=rollouts,
            attached=attached,
            unlinked=unlinked,
            missing=missing,
            found=bool(known or num_keys or records or rollouts or any(attached.values()) or any(unlinked.values())),
        )

    def _unlink(self, names: SubjectDigests, unlink: Callable[[Path, Collection[str]], int]) -> dict[Path, int]:
        """Make the outcomes of a subject unlinkable, before the rows that name the users of an organisation are
        deleted: after a kill, the next call finds them again."""
        subjects, attached = {names.subject}, [one for one in self.records.attached() if one[0].is_file()]
        if names.is_organisation:
            subjects |= self.records.subjects_of(names)
            for path, table in attached:
                subjects |= set() if table == OUTCOMES else subjects_in(path, table, names)
        return {path: unlink(path, subjects) for path, table in attached if table == OUTCOMES}

    def close(self) -> None:
        """Close the files."""
        self.consent.close()
        self.records.close()

    def __enter__(self) -> PrivacyFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
