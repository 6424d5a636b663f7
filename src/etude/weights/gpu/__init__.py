"""Deltas from and into device memory: what the CPU's kernels do, over torch tensors where they are, to the same bytes.

For a trainer that publishes from its GPUs, and an engine that is kept at the head in its own. Needs torch and Triton,
and is library only: no process of a run imports it, and `etude.weights` itself knows nothing of either.

    delta = encode(new, old, specs)               # on the trainer: lists go to the host, no snapshot does
    update = prepare(delta, specs, live)          # on the engine, before the pause: all that takes time or can fail
    update.write()                                # inside the pause: a scatter in place
    update.undo()                                 # or back; `apply` does both at once, with no list between
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ModuleNotFoundError("etude.weights.gpu needs Triton: pip install 'etude[gpu]'", name="triton")

from etude.weights.gpu.kernels import DeviceKernels
from etude.weights.gpu.memory import Items
from etude.weights.gpu.update import Prepared, apply, encode, prepare

__all__ = ["DeviceKernels", "Items", "Prepared", "apply", "encode", "prepare"]
