"""External engines: what the adapters of vLLM and SGLang have in common.

An adapter is a process that starts the server as a child and speaks etude's engine protocol for it. `engine` implements
`seams.Engine` for any such server. `client` speaks HTTP to a server, and defines what the adapter of each server must
implement. `process` runs the server as a child process, which `launch` ends with its adapter. `answers` converts
responses to completions. The specific parts are in `etude.inference.vllm` and `etude.inference.sglang`. Nothing here
loads torch."""
