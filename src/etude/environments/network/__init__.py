"""What machines without a network may reach all the same: mirrors of packages, and, if it is opened, one way out.

Both serve on sockets that they are given; `listen_inside` makes one on a machine's own loopback. `outlets` gives both
to the commands of a build.
"""

from etude.environments.network.inside import listen_inside
from etude.environments.network.mirror import Mirror
from etude.environments.network.packages import Package, Packages, Wanted, wanted
from etude.environments.network.policy import AllowList, is_public
from etude.environments.network.proxy import EgressProxy, ProxyLimits

__all__ = [
    "AllowList",
    "EgressProxy",
    "Mirror",
    "Package",
    "Packages",
    "ProxyLimits",
    "Wanted",
    "is_public",
    "listen_inside",
    "wanted",
]
