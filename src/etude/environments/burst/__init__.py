"""A runtime over many hosts, which decides which host forks which machines. For use as a library only.

`FleetRuntime` is a `Runtime` over the runtimes of several hosts. `Placement` decides which host forks what. It is pure
and does no I/O, so it also serves fleets of your own. `benchmarks.fleet.model` tests it on simulated hosts.

>>> from etude.environments.burst import Capacity, Placement
>>> placement = Placement()
>>> for name in ("a", "b", "c"):
...     placement.join(name, Capacity(cores=96, memory_bytes=768 << 30), 0.0)
>>> placement.add_snapshot("tree", placement.choose_homes(1)[0], 0.0)
>>> sum(batch.n for batch in placement.place("tree", 128, 0.0))
128
"""

from etude.environments.burst.fleet import FleetHost, FleetRuntime
from etude.environments.burst.hosts import Capacity, Need
from etude.environments.burst.placement import Lease, Placement

__all__ = ["Capacity", "FleetHost", "FleetRuntime", "Lease", "Need", "Placement"]
