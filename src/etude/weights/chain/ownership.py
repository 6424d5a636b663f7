"""Whose channel it is, where its pointer cannot say: by the signatures of its manifests.

A pointer that is gone takes its signature with it. Whoever sets it anew must not make an unsigned channel of a signed
one, whose readers would take no version from then on; and must not sign what only lies there, since whoever may write
into a store may put manifests of his own. So manifests are signed like pointers, and the owner of a key stands for
those that he signed and for those which they name by content. Knows nothing of which of them was committed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.manifest import MAX_MANIFEST_BYTES, Manifest, Pointer, Ref
from etude.weights.chain.signing import Signer, check_signer, signed_by

_HINT_KEY = "give the signer's private key: --key FILE; where it is lost, publish under another --name"


@dataclass(frozen=True)
class Owned:
    """What a channel's next pointer may name or follow."""

    versions: tuple[tuple[Ref, Manifest], ...]  # by key
    mixed: str  # what else lies there, in words; empty where there is nothing else


def owned(store: BlobStore, name: str, signer: Signer | None) -> Owned:
    """The whole manifests of a channel that `signer` stands for; all of them where none is signed.

    Raises `WeightsError` where some are signed, and `signer` is nobody or another.
    """
    whole = [*history.stored(store, name)]
    signed = [one for one in whole if one[1].signature]
    if not signed:
        return Owned(tuple(whole), "")
    if signer is None:
        newest = max((manifest for _, manifest in signed), key=lambda m: (m.generation, m.serial)).version
        raise WeightsError(
            f"channel {name!r} is signed, and its pointer is gone or damaged",
            f"{_told(len(whole), signed=len(signed))}; the newest of them is {newest}",
            hint=_HINT_KEY,
        )
    mine = {ref.key for ref, _ in signed if _is_by(signer, store, ref)}
    if not mine:
        raise WeightsError(
            f"channel {name!r} is signed with another key than the one given",
            f"{_told(len(whole), signed=len(signed))}; the public key of the one given is {signer.public_key.hex()}",
            hint=_HINT_KEY,
        )
    vouched = _vouched(whole, mine)
    others = len(signed) - len(mine)
    mixed = _told(len(whole), mine=len(mine), others=others) if len(vouched) < len(whole) else ""
    return Owned(tuple(one for one in whole if one[0].key in vouched), mixed)


def check_owner(store: BlobStore, name: str, key: str, old: Pointer | None, signer: Signer | None) -> None:
    """Raises `WeightsError` where a pointer at `key`, which was `old`, is not `signer`'s to move: a pointer that is not
    there yet is whose the channel is."""
    if old is not None:
        check_signer(key, old, signer)
        return
    own = history.head(store, name)
    if own is not None:
        check_signer(history.pointer_key(name), own, signer)
    else:
        owned(store, name, signer)


def _is_by(signer: Signer, store: BlobStore, ref: Ref) -> bool:
    try:
        data = store.get(ref.key, 0, MAX_MANIFEST_BYTES + 1)
    except KeyError:
        return False
    return hashlib.sha256(data).hexdigest() == ref.sha256 and signed_by(signer.public_key, data)


def _vouched(whole: list[tuple[Ref, Manifest]], mine: set[str]) -> set[str]:
    """The keys of those that are signed, and of all that they name by content."""
    by_key = {ref.key: (ref, manifest) for ref, manifest in whole}
    vouched, waiting = set[str](), [ref for ref, _ in whole if ref.key in mine]
    while waiting:
        ref = waiting.pop()
        if ref.key in vouched or ref.key not in by_key or by_key[ref.key][0] != ref:
            continue
        vouched.add(ref.key)
        manifest = by_key[ref.key][1]
        waiting += [r for r in (manifest.parent, manifest.base) if r]
    return vouched


def _told(total: int, *, signed: int = 0, mine: int = 0, others: int = 0) -> str:
    """How many of a channel's manifests are signed, and by whom."""
    groups = ((signed, "signed"), (mine, "signed with this key"), (others, "signed with another"))
    said = [f"{count} {'is' if count == 1 else 'are'} {how}" for count, how in groups if count]
    unsigned = total - signed - mine - others
    said += [f"{unsigned} not at all"] if unsigned else []
    return f"of {total} version{'s' if total > 1 else ''} in the store {', '.join(said)}"
