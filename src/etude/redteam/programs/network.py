"""Attack programs that reach the network: the host, its neighbours, DNS, a package index."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import urllib.request

from .kit import FACTS, first

_WAIT_S = 1.0


def _connect(address: str, port: int) -> str:
    with socket.create_connection((address, port), _WAIT_S):
        return f"connected to {address}:{port}"


def connect_to_the_host() -> str:
    """Try to connect to a port of the host by loopback, common addresses or a gateway; return evidence of success, or
    ""."""
    addresses = ["127.0.0.1", "::1", "10.0.2.2", "172.17.0.1", "192.168.122.1", "host.docker.internal", "localhost"]
    with contextlib.suppress(OSError), open("/proc/net/route") as routes:
        addresses += [socket.inet_ntoa(struct.pack("<I", int(line.split()[2], 16))) for line in routes.readlines()[1:]]
    return first([lambda a=a: _connect(a, int(FACTS["port"])) for a in addresses])  # type: ignore[misc]


def connect_to_the_hosts_abstract_socket() -> str:
    """Try to connect to an abstract UNIX socket of the host; return evidence of success, or ""."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(_WAIT_S)
        channel.connect("\0" + FACTS["abstract"])
        return f"connected, and was told {channel.recv(64).decode()}"


def fetch_from_a_package_index() -> str:
    """Try to fetch something from the internet: by pip, by HTTP, by git; return evidence of success, or ""."""

    def http(url: str) -> str:
        with urllib.request.urlopen(url, timeout=_WAIT_S) as answer:
            return f"{url} answered {answer.status}"

    def pip() -> str:
        command = ["python3", "-m", "pip", "download", "--timeout", "1", "--retries", "0", "-d", "/tmp/pip", "six"]
        done = subprocess.run(command, capture_output=True, timeout=8, check=False)
        return "pip downloaded" if done.returncode == 0 else ""

    def git() -> str:
        command = ["git", "ls-remote", "https://github.com/python/cpython", "HEAD"]
        done = subprocess.run(command, capture_output=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
        return "git answered" if done.returncode == 0 else ""

    return first([lambda: http("http://pypi.org/simple/six/"), lambda: http("http://1.1.1.1/"), pip, git])


def ask_for_names() -> str:
    """Try to send DNS requests, by the resolver and by hand; a name can carry data; return evidence of success, or
    ""."""

    def resolved() -> str:
        return f"example.com is {socket.getaddrinfo('example.com', 80)[0][4][0]}"

    def asked(server: str) -> str:
        query = bytes.fromhex("beef01000001000000000000076578616d706c6503636f6d0000010001")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_WAIT_S)
            channel.sendto(query, (server, 53))
            return f"{server} answered {len(channel.recv(512))} bytes"

    return first([resolved, *(lambda s=s: asked(s) for s in ("1.1.1.1", "10.0.2.3", "127.0.0.53"))])


def read_cloud_metadata() -> str:
    """Try to connect to the addresses at which clouds hand out credentials; return evidence of success, or ""."""
    return first([lambda a=a: _connect(a, 80) for a in ("169.254.169.254", "169.254.170.2", "fd00:ec2::254")])  # type: ignore[misc]


def find_an_interface() -> str:
    """Try to find a route through an interface other than loopback; return evidence of success, or ""."""
    found = [name for _, name in socket.if_nameindex() if name != "lo"]
    with contextlib.suppress(OSError), open("/proc/net/route") as routes:
        if len(routes.readlines()) > 1:
            return f"a route, by {found}"
    return ""


def leave_by_a_proxy() -> str:
    """Try to connect to a proxy that the environment variables name; return evidence of success, or ""."""
    names = [n for n in os.environ if n.lower() in ("http_proxy", "https_proxy", "all_proxy", "pip_index_url")]

    def through(place: str) -> str:
        host, _, port = place.removeprefix("http://").removeprefix("https://").rstrip("/").partition(":")
        return _connect(host, int(port or 80))

    return first([lambda n=n: through(os.environ[n].rpartition("@")[2]) for n in names])  # type: ignore[misc]


def send_out_of_the_machine() -> str:
    """Try to send a datagram to a broadcast, multicast or internet address; return evidence of success, or ""."""

    def send(address: str) -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            channel.sendto(b"x", (address, 9))
            return f"sent to {address}"

    return first([lambda a=a: send(a) for a in ("255.255.255.255", "224.0.0.1", "8.8.8.8", "169.254.1.1")])  # type: ignore[misc]
