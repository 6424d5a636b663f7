"""Messages between host, launcher and runner: packets of ``kind byte, u32 number, facts``, some with descriptors.

Both ends are etude's own code; packets never contain data that agent code wrote.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<cI")

# host to launcher: create this many machines; kill this machine
SPAWN, KILL = b"S", b"K"
# launcher to host: it is ready (with facts as JSON); a new machine, with descriptors; a machine has ended; a machine
# could not be created (with the reason as text)
STARTED, MADE, GONE, FAILED = b"R", b"M", b"G", b"F"
MADE_FACTS = struct.Struct("<II")  # slot, PID of its PID 1 as launcher and runner see it

# host to runner, each with a number and the pidfd of the machine's PID 1. RUN: run a command, with descriptors of its
# request, its output, and by flags its standard error and input. The others signal all processes of a machine: kill
# them and wait, stop them and wait, continue them
RUN, END_ALL, STOP_ALL, CONTINUE_ALL = b"E", b"X", b"T", b"C"
# host to runner, without descriptors: the deadline of this command has passed
END_ONE = b"K"
RUN_FACTS = struct.Struct("<dIIB")  # deadline_s, slot, PID of PID 1, flags
SEPARATE_STDERR, INPUT_GIVEN, REPORT_PID = 1, 2, 4
# runner to host: PID of a command's first process in the machine; the command has ended; a signal was delivered
BEGUN, ENDED, SIGNALLED = b"B", b"D", b"L"
BEGUN_FACTS = struct.Struct("<I")
ENDED_FACTS = struct.Struct("<B??")  # exit code 0..255; timed out; whether its machine has died
