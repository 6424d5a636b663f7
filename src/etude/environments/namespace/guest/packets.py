"""Messages between host, launcher and runner: packets of ``kind byte, u32 number, facts``, some with descriptors.

Both ends are etude's own code; packets never contain data that agent code wrote.
"""

from __future__ import annotations

import struct

HEAD = struct.Struct("<cI")

# host to launcher: how many machines to make; which machine to kill
SPAWN, KILL = b"S", b"K"
# launcher to host: it is ready (and facts as JSON); a machine, with its work folder and a handle of its PID 1; the
# machine that has ended; why one could not be made (as text)
STARTED, MADE, GONE, FAILED = b"R", b"M", b"G", b"F"
MADE_FACTS = struct.Struct("<II")  # slot, PID of its PID 1 as launcher and runner see it

# host to runner, each with a number of its own and the descriptor of the machine's PID 1: run a command, whose request,
# output, errors where they are apart, and input if there is any, are further descriptors; signal everything in a
# machine: kill it and wait until it is gone, stop it and wait until it stands, let it go on
RUN, END_ALL, STOP_ALL, CONTINUE_ALL = b"E", b"X", b"T", b"C"
# host to runner, without descriptors: the deadline of the command of this number is over
END_ONE = b"K"
RUN_FACTS = struct.Struct("<dIIB")  # deadline_s, slot, PID of PID 1, flags
SEPARATE_STDERR, INPUT_GIVEN, REPORT_PID = 1, 2, 4
# runner to host: a command's first process, by its PID in the machine; the command has ended; a signal was delivered
BEGUN, ENDED, SIGNALLED = b"B", b"D", b"L"
BEGUN_FACTS = struct.Struct("<I")
ENDED_FACTS = struct.Struct("<B??")  # exit code 0..255; timed out; its machine is dead
