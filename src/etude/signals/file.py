"""A file of signals with its secret and, if there is one, the consent of subjects: what is accepted and what counts."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from etude.errors import InputError, PrivacyError, SignalRefused
from etude.privacy import Level, PrivacyFolder, Subject
from etude.privacy.folder import OUTCOMES
from etude.privacy.keys import KeyStore
from etude.privacy.subjects import SubjectDigests
from etude.signals.ids import ResponseId, ResponseIds, model_digest
from etude.signals.messages import GivenSignal, placed
from etude.signals.store import DAY_S, TABLE, Signal, SignalStore, Summary
from etude.signals.versions import Observation


class Status(enum.StrEnum):
    """What became of an accepted signal.

    STORED: it counts. DUPLICATE: it was stored before, and counts once. OVER_CAP: it is not stored, because its subject
    has already `cap` signals of this name about answers of that day (UTC). NO_CONSENT: it is not stored, because its
    subject does not allow it."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    OVER_CAP = "over_cap"
    NO_CONSENT = "no_consent"


class Receipt(NamedTuple):
    """What became of a signal: its id, as sent, and the status."""

    id: str
    status: Status


class Sent(NamedTuple):
    """Signals of one sender, which are accepted or refused together: the names of organisation and user, as the gateway
    knows them ("": no named user)."""

    organisation: str
    user: str
    signals: Sequence[GivenSignal]


class FeedbackFile:
    """A SQLite file of signals. The folder with the same name and ".keys" appended has the secret that signs the ids of
    responses.

    - `privacy`: the privacy folder that says which subjects allow signals to be kept, and whose secret makes the
      subjects' digests. An erasure there deletes the signals here. None: all signals are kept, and the secret of this
      file makes the digests.
    - `keep_days`: number of days after an answer for which signals about it are accepted and kept.
    - `cap`: the most signals of one name that count for a subject and the answers of one day (UTC).
    - `create`: whether a file that does not exist is created.
    - `clock`: returns Unix time in s.

    Close it, or use it in a `with` block. Raises `InputError` if the file does not exist, or was begun with another
    `privacy` (a different folder, or None), and `PrivacyError` if it cannot be used."""

    def __init__(
        self,
        path: Path,
        *,
        privacy: PrivacyFolder | None = None,
        keep_days: float = 90.0,
        cap: int = 1000,
        create: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not create:
            _require(path)
        own = KeyStore(path.with_name(f"{path.name}.keys"), create=not path.exists())
        self._privacy, self._keys = privacy, own if privacy is None else privacy.keys
        self._keep_s, self._cap, self._clock = keep_days * DAY_S, cap, clock
        self._id_secret = own.derive("ids of signals")
        if not path.exists():
            path.touch(mode=0o600)
        self.ids = ResponseIds(own.derive("ids of responses"), clock=clock)
        self.store = SignalStore(path)
        try:
            if self.store.set_once("secret", own.fingerprint) != own.fingerprint:
                hint = "restore the folder of keys that belongs to it; with another one no id of a response is known"
                raise PrivacyError(f"{path} belongs to other keys than {own.folder}", hint=hint)
            if self.store.set_once("subjects", self._keys.fingerprint) != self._keys.fingerprint:
                raise InputError(
                    f"{path} names its subjects by other keys than {self._keys.folder}",
                    "a file of signals belongs to one privacy folder, or to none",
                    hint="use --capture with the folder that it began with (or leave it out), or begin a new file",
                )
            if privacy is not None:
                self.store.set("privacy", str(privacy.path.resolve()))
                privacy.records.attach(path, TABLE)
        except BaseException:
            self.store.close()
            raise

    @staticmethod
    def privacy_of(path: Path) -> Path | None:
        """Return the path of the privacy folder to which a file of signals belongs; None if it belongs to none.

        It is the path at the last time that the file was opened with its privacy folder. Raises `InputError` if the
        file does not exist, and `PrivacyError` if it cannot be used."""
        _require(path)
        store = SignalStore(path)
        try:
            found = store.get("privacy")
        finally:
            store.close()
        return None if found is None else Path(found)

    def add(self, sent: Sequence[Sent], observed: Iterable[Observation] = ()) -> list[list[Receipt] | SignalRefused]:
        """Verify and store what senders sent, and observations of versions, in one transaction.

        Returns one result for each sender: the receipts of its signals, or a `SignalRefused` about an invalid one,
        whose index is in `param` if there are several; then none of this sender's signals is stored. Accepted
        signals are durable. If `PrivacyError` or `DeadlineExceeded` is raised, nothing was stored."""
        verified = [self._verified(one, self._clock()) for one in sent]
        done = list[list[Receipt] | SignalRefused]()
        with self._held(), self.store.transaction():
            now = self._clock()
            seen = [*observed]
            self.store.add_observations({one.model: model_digest(one.model) for one in seen}, seen)
            for one in verified:
                done.append(one if isinstance(one, SignalRefused) else self._decided(one, now))
        return done

    def signals(self, *, since: float = 0.0, response_ids: Sequence[str] | None = None) -> Iterator[Signal]:
        """Yield the stored signals in the order in which they were received. Those of subjects that do not allow it any
        more are left out.

        `since`: only those about answers begun at or after this Unix time. `response_ids`: only those about these
        responses (ids without prefix), at most 1000."""
        where, values = "s.began >= ?", [since, *(response_ids or ())]
        if response_ids is not None:
            where += f" AND s.response_id IN ({', '.join('?' * len(response_ids))})"
        allowed = dict[SubjectDigests, bool]()
        for one in self.store.signals(where, values):
            names = SubjectDigests(one.organisation, one.subject)
            if self._privacy is not None and names not in allowed:
                allowed[names] = self._privacy.consent.level_of(names) is not Level.OFF
            if allowed.get(names, True):
                yield one

    def attach_outcomes(self, path: Path) -> None:
        """Have an erasure in the privacy folder, if there is one, unlink the outcomes in a file of releases."""
        if self._privacy is not None:
            self._privacy.records.attach(path, OUTCOMES)

    def summaries(self) -> list[Summary]:
        """Return numbers of signals for each name and version."""
        return self.store.summaries()

    def erase(self, subject: Subject) -> int:
        """Delete the signals of a subject, for an organisation those of all its users too, and return how many they
        were. Signals that arrive later are not kept if their answer was begun before the erasure.

        Raises `InputError` for a file of a privacy folder: erase the subject there."""
        if self._privacy is not None:
            hint = f"etude privacy erase {subject}: it deletes the signals, too"
            raise InputError("the signals belong to a privacy folder", hint=hint)
        return self.store.erase(self._keys.names(subject), self._clock())

    def expire(self) -> int:
        """Delete the signals about answers that are older than `keep_days`, and return how many they were."""
        return self.store.expire(self._clock() - self._keep_s)

    def close(self) -> None:
        """Close the file; not the privacy folder."""
        self.store.close()

    def __enter__(self) -> FeedbackFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """From the look at consent to the commit no erasure comes between."""
        return contextlib.nullcontext() if self._privacy is None else self._privacy.keys.lock()

    def _verified(self, sent: Sent, now: float) -> _Verified | SignalRefused:
        try:
            names = self._keys.names(Subject.of(sent.organisation, sent.user))
        except InputError as error:
            return SignalRefused(error.what, error.facts, hint=error.hint)
        found = list[tuple[GivenSignal, ResponseId]]()
        for index, one in enumerate(sent.signals):
            response = self.ids.verify(one.response_id, sent.organisation, sent.user)
            refused = _unknown(one) if response is None else _expired(response, now, self._keep_s)
            if refused is not None:
                return refused if len(sent.signals) == 1 else placed(refused, index)
            assert response is not None
            if one.answer >= response.answers:
                absent = _absent(one, response)
                return absent if len(sent.signals) == 1 else placed(absent, index)
            found.append((one, response))
        return _Verified(names, found)

    def _decided(self, one: _Verified, now: float) -> list[Receipt] | SignalRefused:
        """Return the receipts of verified signals, and add those that count; add none if one is refused."""
        names, receipts, new = one.names, list[Receipt](), dict[str, tuple[Signal, bytes]]()
        num_of_day = dict[tuple[str, int], int]()
        for index, (given, response) in enumerate(one.signals):
            signal_id = self._signal_id(names, given.id)
            content = given.content(response.text)
            known = new[signal_id][1] if signal_id in new else self.store.content(names.subject, signal_id)
            level = self._level(names, response.began)
            if known is not None and known != content:
                conflict = _conflict(given)
                return conflict if len(one.signals) == 1 else placed(conflict, index)
            if known is not None:
                status = Status.DUPLICATE
            elif level is Level.OFF:
                status = Status.NO_CONSENT
            else:
                key = given.name, int(response.began // DAY_S)
                if key not in num_of_day:
                    num_of_day[key] = self.store.num_of_day(names.subject, *key)
                num_of_day[key] += 1
                status = Status.STORED if num_of_day[key] <= self._cap else Status.OVER_CAP
            if status is Status.STORED:
                new[signal_id] = (_signal(names, signal_id, given, response, level, now), content)
            receipts.append(Receipt(given.id, status))
        self.store.add(new.values())
        return receipts

    def _level(self, names: SubjectDigests, began: float) -> Level | None:
        """Return the level under which a signal is kept: the lowest since its answer was begun. None: there is no
        consent to ask for."""
        if self._privacy is not None:
            return self._privacy.consent.lowest_since(names, began)
        return Level.OFF if self.store.erased_since(names, began) else None

    def _signal_id(self, names: SubjectDigests, given: str) -> str:
        """Return a keyed digest of an id, which may have a name of a user in it."""
        text = f"{names.subject}\0{given}".encode("utf-8", "surrogatepass")
        return hmac.new(self._id_secret, text, hashlib.sha256).hexdigest()[:32]


def _require(path: Path) -> None:
    if not path.is_file():
        hint = "give the file of etude serve --feedback: --file FILE"
        raise InputError(f"there is no file of signals at {path}", hint=hint)


class _Verified(NamedTuple):
    """Signals that are about answers that their sender was given."""

    names: SubjectDigests
    signals: list[tuple[GivenSignal, ResponseId]]


def _signal(
    names: SubjectDigests, signal_id: str, given: GivenSignal, response: ResponseId, level: Level | None, now: float
) -> Signal:
    latest = max(now, response.began)  # the clock of the gateway that answered may be ahead
    at = latest if given.at is None else min(max(given.at, response.began), latest)
    return Signal(
        subject=names.subject,
        id=signal_id,
        organisation=names.organisation,
        response_id=response.text,
        answer=given.answer,
        name=given.name,
        value=float(given.value),
        at=at,
        clamped=given.at is not None and at != given.at,
        received=now,
        began=response.began,
        model=response.model,
        level=level,
    )


def _unknown(given: GivenSignal) -> SignalRefused:
    return SignalRefused(
        f"no answer {given.response_id[:100]!r} was given to this key and user",
        hint="send the id of the response unchanged, with the API key and the header x-etude-user of its request",
        reason="unknown",
        param="response_id",
    )


def _absent(given: GivenSignal, response: ResponseId) -> SignalRefused:
    answers = "1 answer" if response.answers == 1 else f"{response.answers} answers"
    return SignalRefused(
        f"the response has no answer {given.answer}",
        f"it has {answers}",
        hint="give the index of the choice that it is about, from 0",
        reason="unknown",
        param="answer",
    )


def _expired(response: ResponseId, now: float, keep_s: float) -> SignalRefused | None:
    if now - response.began <= keep_s:
        return None
    facts = f"it was begun {(now - response.began) / DAY_S:.1f} days ago, and signals are kept {keep_s / DAY_S:g} days"
    return SignalRefused("the answer is too old", facts, hint="drop it", reason="expired", param="response_id")


def _conflict(given: GivenSignal) -> SignalRefused:
    return SignalRefused(
        f"the signal {given.id[:100]!r} is known with another content",
        hint="give each signal an id of its own, and send it again unchanged",
        reason="conflict",
        param="id",
    )
