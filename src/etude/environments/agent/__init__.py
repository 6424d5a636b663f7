"""The host's side of the machine agent, which runs commands and accesses files in a machine. Usable alone.

The agent is a small static program (native/agent) and the first process of a machine. A backend starts it and connects
a `Channel` to it. The backend passes the channel to an `AgentMachine`, with functions for what only a backend can do:
end the machine, take a snapshot, and tell whether the host is to blame when the channel ends. The protocol is in
docs/formats/agent.md.
"""

from etude.environments.agent.channel import Channel
from etude.environments.agent.machine import AgentMachine
from etude.environments.agent.program import program

__all__ = ["AgentMachine", "Channel", "program"]
