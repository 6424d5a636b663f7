"""The agent harness: a chat format, tools, and the loop between a policy and a machine. Usable alone, without torch.

A tool call is a command line, which takes few tokens and is easy for a small model:

>>> from etude.harness import read_call, standard_tools
>>> read_call("edit calc.py 3 return a + b", standard_tools().signatures).arguments["text"]
'return a + b'
>>> read_call("edti calc.py", standard_tools().signatures)
'no such tool: edti'
"""

from etude.harness.chat import SPECIAL_TOKENS, ChatFormat, Reply, chat_template
from etude.harness.commands import Call, Signature, read_call
from etude.harness.config import HarnessConfig
from etude.harness.episode import AgentRun, Episode, EpisodeEnded, ModelTurn, RequestOptions
from etude.harness.programs import Harness, run_agent, run_program
from etude.harness.template import ChatError
from etude.harness.tools import ToolSet, Workbench, standard_tools

__all__ = [
    "SPECIAL_TOKENS",
    "AgentRun",
    "Call",
    "ChatError",
    "ChatFormat",
    "Episode",
    "EpisodeEnded",
    "Harness",
    "HarnessConfig",
    "ModelTurn",
    "Reply",
    "RequestOptions",
    "Signature",
    "ToolSet",
    "Workbench",
    "chat_template",
    "read_call",
    "run_agent",
    "run_program",
    "standard_tools",
]
