"""SGLang as an engine: its server in an environment of its own, and an adapter that speaks etude's protocol before it.

`server` is the process that a run starts, with SGLang's own as its child (`process`); `protocol` translates; `follow`
comes to the head of the chain, writes it as a checkpoint, and has SGLang load that in a pause. What it has in common
with other makes is `etude.inference.external`. Nothing here loads torch, and nothing of SGLang is changed.
"""
