"""Token-exact conversations: a tree of turns that tokenises only new messages and stores the sampled tokens.

Usable alone, without torch. A turn is one completion of the model with the messages before it. The harness and the
gateway both use this package, so the same messages give the same tokens:

    tree = TurnTree(ChatFormat.load("checkpoint"), session_id="g000012.3/0")
    prompt = tree.prompt(messages, signatures)          # only messages after the deepest known turn are tokenised
    completion = await policy.complete(...)             # prompt.token_ids, prompt.session_id, prompt.fork_from
    tree.record(prompt, completion, reply, sampling=sampling)
    tree.trace().path(0)                                # exactly what the model read and sampled
"""

from etude.capture.chat import Chat, Message, ParsedCall, ParsedReply
from etude.capture.context import SummaryLimits
from etude.capture.digests import KeptMessage, KeptMessages, KeptTools
from etude.capture.stops import Cut, complete_until_stop, cut_at_stop
from etude.capture.summaries import Summaries
from etude.capture.tree import Node, Prompt, TurnTree

__all__ = [
    "Chat",
    "Cut",
    "KeptMessage",
    "KeptMessages",
    "KeptTools",
    "Message",
    "Node",
    "ParsedCall",
    "ParsedReply",
    "Prompt",
    "Summaries",
    "SummaryLimits",
    "TurnTree",
    "complete_until_stop",
    "cut_at_stop",
]
