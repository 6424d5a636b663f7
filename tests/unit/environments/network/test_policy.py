"""The addresses that a machine may reach."""

from __future__ import annotations

import pytest

from etude.environments.network import AllowList, is_public
from etude.errors import InputError


def test_nothing_is_allowed_unless_it_is_listed():
    assert not AllowList([]).permits("example.com", 443)


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("a.com", "a.com", 443, True),
        ("a.com", "a.com", 80, True),
        ("a.com", "a.com", 8080, False),
        ("a.com:8080", "a.com", 8080, True),
        ("a.com:8080", "a.com", 443, False),
        ("a.com", "b.a.com", 443, False),
        ("a.com", "aa.com", 443, False),
        (".a.com", "b.a.com", 443, True),
        (".a.com", "c.b.a.com", 443, True),
        (".a.com", "a.com", 443, False),
        (".a.com", "evila.com", 443, False),
        (".a.com", ".a.com", 443, False),
        ("A.Com", "a.com", 443, True),
        ("1.2.3.4", "1.2.3.4", 80, True),
        ("[2001:db8::1]:80", "2001:db8::1", 80, True),
    ],
)
def test_a_rule_is_exact_or_a_suffix(rule, host, port, allowed):
    assert AllowList([rule]).permits(host, port) is allowed


@pytest.mark.parametrize(
    "rule", ["", "*", "*.a.com", "a.com:", "a.com:0", "a.com:99999", "http://a.com", "a.com/x", ".", "a b"]
)
def test_an_invalid_network_rule_is_refused(rule):
    with pytest.raises(InputError, match="not an allow-list rule"):
        AllowList([rule])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "100.64.0.1",
        "192.0.0.192",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "240.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a00:1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2002:a00:1::",
        "2001:0:1::1",
        "::127.0.0.1",
        "localhost",
        "1.2.3",
        "0x7f.1",
        "2130706433",
    ],
)
def test_no_address_of_somebodys_own_network_is_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)
