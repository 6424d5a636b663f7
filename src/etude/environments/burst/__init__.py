"""Many machines at once: warm forks by forecast on one host, placement over many hosts, and what a fleet would do.

`WarmRuntime` stands before any runtime and has machines ready before they are asked for; `FleetRuntime` is one runtime
over several. `Placement` decides where, pure and without I/O, for whoever has a fleet of their own; `simulate` runs it
against hosts of measured costs.

>>> from etude.environments.burst import Capacity, Placement
>>> placement = Placement()
>>> for name in ("a", "b", "c"):
...     placement.join(name, Capacity(cores=96, memory_bytes=768 << 30), 0.0)
>>> placement.holds("tree", placement.homes(1)[0], 0.0)
>>> sum(batch.n for batch in placement.place("tree", 128, 0.0))
128
"""

from etude.environments.burst.calibrate import burst, measure
from etude.environments.burst.fake import Measured
from etude.environments.burst.fleet import FleetHost, FleetRuntime
from etude.environments.burst.forecast import Forecast
from etude.environments.burst.hosts import Capacity, Need
from etude.environments.burst.lease import Lease
from etude.environments.burst.placement import Placement
from etude.environments.burst.pressure import Ceilings
from etude.environments.burst.scenario import Faults, Scenario
from etude.environments.burst.simulate import simulate
from etude.environments.burst.warm import WarmRuntime

__all__ = [
    "Capacity",
    "Ceilings",
    "Faults",
    "FleetHost",
    "FleetRuntime",
    "Forecast",
    "Lease",
    "Measured",
    "Need",
    "Placement",
    "Scenario",
    "WarmRuntime",
    "burst",
    "measure",
    "simulate",
]
