"""Exact delta updates of model weights, from a trainer to inference engines, through a blob store. Usable alone.

A `Channel` publishes versions of a set of tensors. Each version is stored as a delta from the version before, now and
then also as a full snapshot (an *anchor*). A `Follower` fetches, decodes and verifies the newest version. `encode` and
`apply` do the same for two sets of arrays without a store. All of it is bit-exact for every dtype.
`docs/guides/weights-alone.md` is the guide.

Importing this package is cheap: numpy and the other dependencies are imported when a name is first used.

>>> import numpy as np
>>> from etude.stores import MemoryStore
>>> from etude.weights import Channel, Follower, Tensor
>>> store = MemoryStore()
>>> channel, follower = Channel(store), Follower(store)
>>> old = {"w": Tensor("bf16", (3,), np.array([0x3F80, 0x3F81, 0x3F82], np.uint16))}
>>> first = channel.publish(old, step=0, parent=None, rollout_ids=[])
>>> follower.advance().version == first.version
True
>>> new = {"w": Tensor("bf16", (3,), np.array([0x3F80, 0x3F81, 0x3F83], np.uint16))}
>>> second = channel.publish(new, step=1, parent=first.version, rollout_ids=["g000000.0"])
>>> positions, codes = follower.advance().changed["w"]
>>> positions.tolist(), codes.tolist()
([2], [16259])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.weights.chain.channel import Channel
    from etude.weights.chain.history import chain, lineage
    from etude.weights.chain.manifest import Manifest
    from etude.weights.delta.deltas import apply, bound, encode
    from etude.weights.follow.follower import Follower, Update
    from etude.weights.follow.follower_process import FollowerProcess
    from etude.weights.tensors import Spec, Tensor, content_digest, tensor_digest

__all__ = [
    "Channel",
    "Follower",
    "FollowerProcess",
    "Manifest",
    "Spec",
    "Tensor",
    "Update",
    "apply",
    "bound",
    "chain",
    "content_digest",
    "encode",
    "lineage",
    "tensor_digest",
]

_HOME = {
    "Channel": "chain.channel",
    **dict.fromkeys(("chain", "lineage"), "chain.history"),
    "Manifest": "chain.manifest",
    **dict.fromkeys(("apply", "bound", "encode"), "delta.deltas"),
    **dict.fromkeys(("Follower", "Update"), "follow.follower"),
    "FollowerProcess": "follow.follower_process",
    **dict.fromkeys(("Spec", "Tensor", "content_digest", "tensor_digest"), "tensors"),
}

import_module("etude.weights.chain")  # the folder, now: a later first import would put it in the place of the function
globals().pop("chain")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
