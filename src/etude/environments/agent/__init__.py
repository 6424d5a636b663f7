"""The host's side of the machine agent: commands and files of a machine over one channel. Usable alone.

The agent is a small static program (native/agent), the first process of a machine. A backend starts it, connects a
`Channel` to it, and passes that to an `AgentMachine` together with what only the backend can do: end the machine, take
a snapshot, and decide who is to blame when the channel ends. The protocol: docs/formats/agent.md.
"""

from etude.environments.agent.channel import Channel
from etude.environments.agent.machine import AgentMachine
from etude.environments.agent.program import program

__all__ = ["AgentMachine", "Channel", "program"]
