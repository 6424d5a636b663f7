"""Which manifests of a channel a signing key covers, for when its pointer is lost.

A lost pointer takes its signature with it. Whoever sets it again must not turn a signed channel into an unsigned one,
whose readers would accept nothing afterwards. And they must not sign arbitrary manifests, since anyone with write
access to a store can put manifests there. So manifests are signed like pointers, and a key covers the manifests that it
signed and those that they refer to by digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from etude.errors import WeightsError
from etude.seams import BlobStore
from etude.weights.chain import history
from etude.weights.chain.manifest import MAX_MANIFEST_BYTES, Manifest, Pointer, Ref
from etude.weights.chain.signing import Signer, check_signer, is_signed_by

_HINT_KEY = "give the signer's private key: --key FILE; if it is lost, publish under another --name"


@dataclass(frozen=True)
class OwnedManifests:
    """The result of `owned_manifests`: the manifests of a channel that a signing key covers. A new pointer may name one
    of them.

    `versions`: sorted by key. `mixed`: a text about manifests that the key does not cover; empty if there are none.
    """

    versions: tuple[tuple[Ref, Manifest], ...]
    mixed: str


def owned_manifests(store: BlobStore, name: str, signer: Signer | None) -> OwnedManifests:
    """Return the readable manifests of a channel that the key of `signer` signed, and the manifests that they refer to.

    If no manifest of the channel is signed, all are returned. Raises `WeightsError` if some are signed and `signer` is
    None or has another key.
    """
    whole = [*history.stored(store, name)]
    signed = [one for one in whole if one[1].signature]
    if not signed:
        return OwnedManifests(tuple(whole), "")
    if signer is None:
        newest = max((manifest for _, manifest in signed), key=lambda m: (m.generation, m.serial)).version
        raise WeightsError(
            f"channel {name!r} is signed, and its pointer is missing or damaged",
            f"{_count_text(len(whole), signed=len(signed))}; the newest of them is {newest}",
            hint=_HINT_KEY,
        )
    mine = {ref.key for ref, _ in signed if _is_by(signer, store, ref)}
    if not mine:
        raise WeightsError(
            f"channel {name!r} is signed with another key than the one given",
            f"{_count_text(len(whole), signed=len(signed))}; the given key's public key is {signer.public_key.hex()}",
            hint=_HINT_KEY,
        )
    vouched = _vouched(whole, mine)
    others = len(signed) - len(mine)
    mixed = _count_text(len(whole), mine=len(mine), others=others) if len(vouched) < len(whole) else ""
    return OwnedManifests(tuple(one for one in whole if one[0].key in vouched), mixed)


def check_owner(store: BlobStore, name: str, key: str, old: Pointer | None, signer: Signer | None) -> None:
    """Raise `WeightsError` unless the owner of `signer` may replace the pointer that is stored under `key`.

    `old`: that pointer; None if it does not exist yet; then the owner of channel `name` may create it. `signer` None:
    the caller has no key, and may replace only an unsigned pointer.
    """
    if old is not None:
        check_signer(key, old, signer)
        return
    own = history.head(store, name)
    if own is not None:
        check_signer(history.pointer_key(name), own, signer)
    else:
        owned_manifests(store, name, signer)


def _is_by(signer: Signer, store: BlobStore, ref: Ref) -> bool:
    try:
        data = store.get(ref.key, 0, MAX_MANIFEST_BYTES + 1)
    except KeyError:
        return False
    return hashlib.sha256(data).hexdigest() == ref.sha256 and is_signed_by(signer.public_key, data)


def _vouched(whole: list[tuple[Ref, Manifest]], mine: set[str]) -> set[str]:
    """Return the keys of the signed manifests, and of all that they refer to by digest."""
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


def _count_text(total: int, *, signed: int = 0, mine: int = 0, others: int = 0) -> str:
    groups = ((signed, "signed"), (mine, "signed with this key"), (others, "signed with another"))
    parts = [f"{count} {'is' if count == 1 else 'are'} {how}" for count, how in groups if count]
    unsigned = total - signed - mine - others
    parts += [f"{unsigned} not at all"] if unsigned else []
    return f"of {total} version{'s' if total > 1 else ''} in the store {', '.join(parts)}"
