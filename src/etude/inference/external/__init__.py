"""Servers of another make as engines: what their adapters have in common.

`engine` is `seams.Engine` before any of them; `calls` speaks HTTP to a server and says what each make's own calls must
do; `process` has that server as a child, which `launch` ends with its adapter; `parts` has answers in our terms. What a
make asks and answers is its own folder's: `vllm`, `sglang`. Nothing here loads torch.
"""
