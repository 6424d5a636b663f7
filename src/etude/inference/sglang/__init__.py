"""SGLang as an engine: its server in a separate environment, and an adapter that implements etude's protocol.

`server` is the process that a run starts, with SGLang's server as its child (`process`). `protocol` encodes requests
and parses responses. The parts shared with vLLM are in `etude.inference.external`. Nothing here loads torch, and no
code of SGLang is changed.
"""
