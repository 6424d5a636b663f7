"""The agent harness: a chat format, tools, and the loop between a model and a machine. Usable alone, without torch.

A tool call is a command line, which takes few tokens and is easy for a small model:

>>> from etude.harness import read_call, standard_tools
>>> read_call("edit calc.py 3 return a + b", standard_tools().signatures).arguments["text"]
'return a + b'
>>> read_call("edti calc.py", standard_tools().signatures)
'no such tool: edti'
"""

from etude.harness.chat import ChatFormat, chat_template
from etude.harness.commands import Call, Signature, read_call
from etude.harness.config import HarnessConfig
from etude.harness.episode import Episode, EpisodeEnded, ModelTurn, RequestOptions
from etude.harness.programs import run_agent, run_program
from etude.harness.tools import ToolSet, Workbench, standard_tools

__all__ = [
    "Call",
    "ChatFormat",
    "Episode",
    "EpisodeEnded",
    "HarnessConfig",
    "ModelTurn",
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
