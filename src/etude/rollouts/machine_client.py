"""The program `etude-machine`. With it an agent program outside of the machine runs commands in it.

    etude-machine [-i] [-c] COMMAND...  run a shell command; its output and exit code become those of this program
    etude-machine --read PATH           print a file of the machine
    etude-machine --write PATH          replace a file of the machine by standard input

With -i the command gets standard input, which is read to its end first. Without it the command gets an empty one: many
agents start their shell with an input that they never close.

The environment variable ETUDE_MACHINE_URL is the machine's URL with its secret. Only the standard library is used."""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def call(what: str, **order: object) -> dict[str, Any]:
    """Send a request to the rollout's machine, and return the JSON answer. Exits with code 125 if it is refused.

    `what` is "exec", "read" or "write", and `order` has the fields of the JSON body."""
    body = json.dumps(order).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{os.environ['ETUDE_MACHINE_URL']}/{what}", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        print(f"etude-machine: {json.load(error)['error']['message']}", file=sys.stderr)
        sys.exit(125)


def main() -> None:
    """Run this client with the arguments of the command line."""
    words = sys.argv[1:]
    if interactive := words[:1] == ["-i"]:
        words = words[1:]
    if not words:
        sys.exit(__doc__)
    if words[0] == "--read":
        sys.stdout.buffer.write(base64.b64decode(call("read", path=words[1])["content"]))
    elif words[0] == "--write":
        call("write", path=words[1], content=base64.b64encode(sys.stdin.buffer.read()).decode())
    else:
        command = words[1] if words[0] in ("-c", "-lc") else shlex.join(words) if len(words) > 1 else words[0]
        begun = time.monotonic()
        done = call("exec", command=command, stdin=sys.stdin.read() if interactive else "")
        sys.stdout.write(done["output"])
        sys.stdout.flush()
        if done["truncated"]:
            print("etude-machine: the output was too long, and its middle was left out", file=sys.stderr)
        if done["timed_out"]:
            after_s = round(time.monotonic() - begun, 1)
            print(f"etude-machine: killed after {after_s:g} s (harness.tool_deadline_s)", file=sys.stderr)
        sys.exit(done["exit_code"])


if __name__ == "__main__":
    main()
