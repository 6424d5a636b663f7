"""Many machines at once on many hosts: one runtime over several others, and its placement algorithm.

`FleetRuntime` is a `Runtime` over several others. `Placement` decides which host forks what; it is pure and does no
I/O, so it also serves fleets of your own. Library only: no setting of a run uses it. `benchmarks.fleet_model` tests the
placement on simulated hosts.

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
