"""Listen on the loopback interface of a machine that has no network.

The socket is created in the machine's network namespace and kept by this process, which serves it from the host.
Nothing is routed and no interface is added, so the machine reaches exactly this service. It needs the right to enter
the namespace: root, or the user who owns it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

from etude.errors import MachineError

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_DEADLINE_S = 20.0
_HELPER = """
import ctypes, socket, sys
sys.path.insert(0, {folder!r})
libc = ctypes.CDLL(None, use_errno=True)
if {user} >= 0 and libc.setns({user}, 0x10000000) < 0 or libc.setns({net}, 0x40000000) < 0:
    sys.exit(ctypes.get_errno())
from etude.environments.network.loopback import loopback_listener
listener = loopback_listener({port})
socket.send_fds(socket.socket(fileno={channel}), [b"x"], [listener.fileno()])
"""


def loopback_listener(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` in the network namespace of this process.

    The loopback interface is brought up if necessary."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    request = struct.pack("16sh22x", b"lo", 0)
    (flags,) = struct.unpack_from("h", fcntl.ioctl(listener, _SIOCGIFFLAGS, request), 16)
    if not flags & _IFF_UP:
        fcntl.ioctl(listener, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener


def listen_on_loopback(pid: int, port: int = 0) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` in the network namespace of the process `pid`.

    Port 0 picks a free port. Raises `MachineError` if that namespace cannot be entered."""
    net = user = -1
    try:
        net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        user = -1 if os.geteuid() == 0 else _owning_user_namespace(net)
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.settimeout(_DEADLINE_S)
            return _create_in_namespace(net, user, port, receiver, sender)
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = "run as root, or as the user who owns the machine"
        raise MachineError("no listening socket could be made in the machine", str(error), hint=hint) from None
    finally:
        for fd in (net, user):
            if fd >= 0:
                os.close(fd)


def _owning_user_namespace(net: int) -> int:
    return fcntl.ioctl(net, 0xB701)  # NS_GET_USERNS


def _create_in_namespace(
    net: int, user: int, port: int, receiver: socket.socket, sender: socket.socket
) -> socket.socket:
    """Create the socket in a child process: only a single-threaded process can enter a user namespace."""
    folder = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    code = _HELPER.format(folder=folder, user=user, net=net, port=port, channel=sender.fileno())
    fds = [fd for fd in (net, user, sender.fileno()) if fd >= 0]
    done = subprocess.run(
        [sys.executable, "-s", "-c", code], pass_fds=fds, stderr=subprocess.PIPE, timeout=_DEADLINE_S, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(done.returncode, lines[-1] if lines else os.strerror(done.returncode))
    _, received, _, _ = socket.recv_fds(receiver, 1, 1)
    return socket.socket(fileno=received[0])
