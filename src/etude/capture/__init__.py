"""Conversations as the model saw them: a tree of turns that renders what is new and records what was sampled.

Usable alone, no torch. The harness and the gateway ask through it, so that both have the same tokens for the same
messages:

    tree = TurnTree(ChatFormat.load("checkpoint"), session_id="g000012.3/0")
    prompt = tree.prompt(messages, signatures)          # only messages after the deepest known turn are tokenised
    completion = await policy.complete(...)             # prompt.token_ids, prompt.session_id, prompt.fork_from
    tree.record(prompt, completion, reply, sampling=sampling)
    tree.trace().path(0)                                # exactly what the model read and sampled
"""

from etude.capture.chat import Chat, Message, ParsedCall, ParsedReply
from etude.capture.tree import Node, Prompt, TurnTree

__all__ = ["Chat", "Message", "Node", "ParsedCall", "ParsedReply", "Prompt", "TurnTree"]
