"""An agent that edits lines of a file and hands in. Standard library only; it talks to any OpenAI server.

It runs beside its machine and knows nothing of etude but `etude-machine`, which reads and writes the machine's
files."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request


def tool(name: str, *parameters: str) -> dict:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [tool("edit", "path", "line", "text"), tool("submit")]


def ask(messages: list[dict]) -> dict:
    body = json.dumps({"model": "any", "messages": messages, "tools": TOOLS, "temperature": 0.2}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def machine(*words: str, text: str = "") -> str:
    return subprocess.run(["etude-machine", *words], input=text, capture_output=True, text=True, check=True).stdout


def edit(path: str, line: str, text: str) -> str:
    try:
        lines = machine("--read", path).splitlines()
        old = lines[int(line) - 1]
        lines[int(line) - 1] = old[: len(old) - len(old.lstrip())] + text
        machine("--write", path, text="\n".join(lines) + "\n")
    except (ValueError, IndexError, subprocess.CalledProcessError):
        return "refused"
    return "ok"


messages = [{"role": "user", "content": os.environ["ETUDE_TASK"]}]
while True:
    reply = ask(messages)
    messages.append(reply)
    for call in reply.get("tool_calls", []):
        print(call["function"], flush=True)
        if call["function"]["name"] == "submit":
            raise SystemExit(0)
        try:
            output = edit(**json.loads(call["function"]["arguments"]))
        except TypeError as error:
            output = str(error)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    if not reply.get("tool_calls"):
        messages.append({"role": "user", "content": "call a tool"})
