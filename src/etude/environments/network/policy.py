"""Egress policy: an allow-list of hosts, and a check that an address is public."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from etude.errors import InputError

_RULE = re.compile(r"(\.?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_PORTS = (80, 443)
_MORE_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
    )
)  # carrier-grade NAT, protocol assignments, benchmarks; and addresses that embed an IPv4 address


class Rule(NamedTuple):
    """An entry of an allow-list.

    `host` is an exact name, or ".example.com" for all names below example.com. `port` None allows ports 80 and 443."""

    host: str
    port: int | None


class AllowList:
    """The hosts that a machine may reach; an empty list allows none.

    Each rule has the form ``host``, ``host:port``, ``.suffix`` or ``.suffix:port``. Raises `InputError` for others.

    >>> allowed = AllowList(["pypi.org", ".example.com:8443"])
    >>> [allowed.permits(host, 8443) for host in ("a.example.com", "example.com", "pypi.org")]
    [True, False, False]
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules = tuple(_rule(text) for text in rules)

    def permits(self, host: str, port: int) -> bool:
        """Return whether this port of a host (in lower case) may be reached."""
        return any(
            (host.endswith(rule.host) and host != rule.host if rule.host.startswith(".") else host == rule.host)
            and (port in _PORTS if rule.port is None else port == rule.port)
            for rule in self.rules
        )


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text.strip().lower())
    if not found or (found[2] and not 0 < int(found[2]) < 65_536):
        raise InputError(
            f"{text[:80]!r} is not an allow-list rule", hint="write host, host:port, .suffix or .suffix:port"
        )
    return Rule(found[1].strip("[]"), int(found[2]) if found[2] else None)


def is_public(address: str) -> bool:
    """Return whether an IP address is on the public internet.

    Not public are private networks, this host, link-local addresses, metadata services of clouds, multicast, and IPv6
    addresses that contain an IPv4 address.

    >>> [is_public(a) for a in ("1.1.1.1", "10.0.0.1", "169.254.169.254", "::ffff:127.0.0.1", "fd00::1", "nonsense")]
    [True, False, False, False, False, False]
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if not found.is_global or found.is_multicast or found.is_reserved or found.is_unspecified:
        return False
    return not any(found in network for network in _MORE_PRIVATE if network.version == found.version)
