"""What machines without a network may reach all the same: mirrors of packages, and, if it is opened, one way out.

Both serve on sockets that they are given; `listen_on_loopback` makes one on a machine's own loopback. `outlets` gives both
to the commands of a build.
"""

from etude.environments.network.loopback import listen_on_loopback
from etude.environments.network.mirror import Mirror
from etude.environments.network.packages import Package, Packages, PackageSpec, parse_package_spec
from etude.environments.network.policy import AllowList, is_public
from etude.environments.network.proxy import EgressProxy, ProxyLimits

__all__ = [
    "AllowList",
    "EgressProxy",
    "Mirror",
    "Package",
    "PackageSpec",
    "Packages",
    "ProxyLimits",
    "is_public",
    "listen_on_loopback",
    "parse_package_spec",
]
