"""The system-call filter of machines: it denies what namespaces do not isolate, and allows everything else.

Denied: access to other processes' memory, mounts, the kernel itself, large and young kernel interfaces (bpf, io_uring,
keyrings, userfaultfd, perf), new namespaces, and all socket families but UNIX and IP (vsock has no namespace and
reaches a hypervisor). clone3 returns ENOSYS, since its flags are behind a pointer. A process cannot give up being a
subreaper, since a command's processes are found by it.

Call numbers are found by bisection: the kernel evaluates a filter for every call number when it is installed, and for
many calls afterwards. Jumps lead only forward, so the program is built from its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# name: (x86_64, aarch64); None where the architecture has no such call
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "fanotify_init": (300, 262), "memfd_secret": (447, 447), "shmget": (29, 194), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "io_setup": (206, 0),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT, _SOCKET, _IOCTL = (56, 220), (435, 435), (302, 261), (41, 198), (16, 29)
_PRCTL, _CHILD_SUBREAPER = (157, 167), 36
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000
_NEW_NAMESPACES = 0x7E02_0000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24  # offsets in struct seccomp_data; low words of the arguments
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class _Backwards:
    """Instructions of a program, the last one first. A position is its distance from the end, and never changes."""

    def __init__(self) -> None:
        self.steps: list[_Instruction] = []
        self.allow, self.eperm = self.answer(_ALLOW), self.refuse(errno.EPERM)

    def answer(self, verdict: int) -> int:
        return self._put(_RETURN, 0, 0, verdict)

    def refuse(self, number: int) -> int:
        return self.answer(_ERRNO | number)

    def load(self, offset: int) -> int:
        """Load a word of the call's data, for the instruction that was added last."""
        return self._put(_LOAD, 0, 0, offset)

    def when(self, test: int, value: int, then: int, otherwise: int) -> int:
        here = len(self.steps)
        return self._put(test, here - then, here - otherwise, value)

    def argument_in(self, offset: int, values: tuple[int, ...], then: int, otherwise: int) -> int:
        for value in values:
            otherwise = self.when(_JUMP_EQ, value, then, otherwise)
        return self.load(offset)

    def bisect(self, ranges: list[tuple[int, int]]) -> int:
        """Find a call's number in ordered (first number, position) pairs."""
        if len(ranges) == 1:
            return ranges[0][1]
        middle = len(ranges) // 2
        above, below = self.bisect(ranges[middle:]), self.bisect(ranges[:middle])
        return self.when(_JUMP_GE, ranges[middle][0], above, below)

    def _put(self, code: int, then: int, otherwise: int, value: int) -> int:
        self.steps.append((code, then, otherwise, value))
        return len(self.steps)


def _places(program: _Backwards, column: int) -> dict[int, int]:
    """Position to jump to, by call number, for all calls that are not simply allowed."""
    allow, eperm = program.allow, program.eperm
    places = {number: eperm for numbers in _DENIED.values() if (number := numbers[column]) is not None}
    program.when(_JUMP_SET, _NEW_NAMESPACES, eperm, allow)
    places[_CLONE[column]] = program.load(_ARG0)
    places[_CLONE3[column]] = program.refuse(errno.ENOSYS)
    places[_PRLIMIT[column]] = program.argument_in(_ARG0, (0,), allow, eperm)
    no_family = program.refuse(errno.EAFNOSUPPORT)
    places[_SOCKET[column]] = program.argument_in(_ARG0, _SOCKET_FAMILIES, allow, no_family)
    second_is_zero = program.argument_in(_ARG1, (0,), eperm, allow)
    places[_PRCTL[column]] = program.argument_in(_ARG0, (_CHILD_SUBREAPER,), second_is_zero, allow)
    places[_IOCTL[column]] = program.argument_in(_ARG1, _TERMINAL_INJECTION, eperm, allow)
    return places


def instructions(machine: str) -> list[_Instruction]:
    """Return the filter for an architecture ("x86_64", "aarch64") as BPF instructions."""
    column = list(_AUDIT_ARCH).index(machine)
    program = _Backwards()
    places = _places(program, column)
    ranges = [(0, program.allow)]
    for number in sorted(places):
        for first, place in ((number, places[number]), (number + 1, places.get(number + 1, program.allow))):
            if place != ranges[-1][1]:
                ranges.append((first, place))
    if machine == "x86_64":
        ranges.append((_X32_BIT, program.eperm))
    kill = program.answer(_KILL)
    program.bisect(ranges)
    number = program.load(_NUMBER)
    program.when(_JUMP_EQ, _AUDIT_ARCH[machine], number, kill)
    program.load(_ARCH)
    return program.steps[::-1]


def packed() -> bytes:
    """Return the filter for this architecture as bytes, eight per instruction.

    Raises `KeyError` for an unknown architecture.
    """
    return b"".join(struct.pack("<HBBI", *step) for step in instructions(os.uname().machine))


def build() -> ctypes.Structure:
    """Return the filter for this architecture in the form that `syscalls.set_seccomp` needs.

    Raises `KeyError` for an unknown architecture.
    """
    program = packed()
    return _Program(len(program) // 8, program)
