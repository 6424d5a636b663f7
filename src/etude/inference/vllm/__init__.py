"""vLLM as an engine: its server in a separate environment, and an adapter that implements etude's protocol.

`server` is the process that a run starts, with vLLM's server as its child (`process`). `protocol` encodes requests and
parses responses. `worker` is loaded by vLLM's workers, `scheduling` by its core. The parts shared with SGLang are in
`etude.inference.external`. No module of the adapter loads torch, and no code of vLLM is changed.
"""
