"""Weights on their way from the trainer to every engine: exact deltas under a chain of digests. Usable alone.

>>> import numpy as np
>>> from etude.stores import MemoryStore
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
