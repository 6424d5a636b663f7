"""vLLM as an engine: its server in an environment of its own, and an adapter that speaks etude's protocol before it.

`environment` says where that environment is and `install` makes it; `server` is the process that a run starts, with
vLLM's own (`launch`) as its child; `protocol` translates, `engine` is `seams.Engine` over both. `worker` and `routes`
are loaded by vLLM's workers. No module of etude's side loads torch; no module at all changes vLLM's code.
"""
