"""Limited network access for machines that have no network: package mirrors, and a proxy with an allow-list.

Both serve on sockets that they are given; `listen_on_loopback` creates one on a machine's own loopback interface.
`BuildNetwork` offers both to the commands of an image build.
"""

from etude.environments.network.loopback import listen_on_loopback
from etude.environments.network.mirror import Mirror
from etude.environments.network.packages import Package, Packages, PackageSpec, parse_package_spec
from etude.environments.network.policy import AllowList, is_public
from etude.environments.network.proxy import EgressProxy, ProxyLimits

__all__ = [
    "AllowList", "EgressProxy", "Mirror", "Package", "PackageSpec", "Packages", "ProxyLimits", "is_public",
    "listen_on_loopback", "parse_package_spec",
]  # fmt: skip
