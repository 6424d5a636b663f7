"""Many machines at once over many hosts: one runtime over several others, and the placement behind it.

`FleetRuntime` is a `Runtime` over several others. `Placement` decides which host forks what, pure and without I/O, for
whoever has a fleet of their own. A library for code that asks for it: no setting of a run leads here.
`benchmarks.fleet_model` runs the placement against hosts of measured costs.

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
