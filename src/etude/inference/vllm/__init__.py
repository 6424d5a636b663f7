"""vLLM as an engine: its server in an environment of its own, and an adapter that speaks etude's protocol before it.

`server` is the process that a run starts, with vLLM's own as its child (`process`); `protocol` translates, `follow` has
its workers come to the head of the chain. `worker` and `routes` are loaded by vLLM's workers, `scheduling` by its core.
What it has in common with other makes is `etude.inference.external`. No module of etude's side loads torch; no module at
all changes vLLM's code.
"""
