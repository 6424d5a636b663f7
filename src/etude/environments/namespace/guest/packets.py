"""What host, launcher and runner tell each other: packets of ``kind byte, u32 number, facts``, some with descriptors.

Both ends are ours; nothing that agent code wrote is ever in one.
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

# host to runner: run a command in a machine, with descriptors: PID 1, request, output, and input if there is any
RUN = b"E"
RUN_FACTS = struct.Struct("<dII")  # deadline_s, slot, PID of PID 1
# runner to host: the machine's command has ended, and everything it started with it
ENDED = b"D"
ENDED_FACTS = struct.Struct("<B??")  # exit code 0..255; timed out; its machine is dead
