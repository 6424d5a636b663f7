"""Deltas of weights in device memory: the codec of `etude.weights.delta` on torch tensors on a GPU, with the same
bytes.

For a trainer that publishes from its GPUs, and an engine that updates its weights in GPU memory. Needs torch and
Triton. Library only: no process of a run imports it, and `etude.weights` itself needs neither.

    delta = encode(new, old, specs)               # on the trainer: only the changes are copied to the host
    update = prepare(delta, specs, live)          # on the engine, before the pause: everything slow or fallible
    update.write()                                # in the pause: scatter in place
    update.undo()                                 # or back; `apply` decodes and writes at once, without a list
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ModuleNotFoundError("etude.weights.gpu needs Triton: pip install 'etude[gpu]'", name="triton")

from etude.weights.gpu.kernels import DeviceKernels
from etude.weights.gpu.memory import Items
from etude.weights.gpu.update import Prepared, apply, encode, prepare

__all__ = ["DeviceKernels", "Items", "Prepared", "apply", "encode", "prepare"]
