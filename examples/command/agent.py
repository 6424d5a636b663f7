"""An agent in a few lines of plain Python: it talks to any OpenAI server, and acts with a shell command.

It knows nothing of etude but `etude-machine`, which runs a command in the machine of the task."""

import json
import os
import subprocess
import urllib.request

SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [
    {"type": "function", "function": {"name": "run", "description": "Run a shell command.", "parameters": SHELL}},
    {"type": "function", "function": {"name": "submit", "description": "Hand in.", "parameters": {"type": "object"}}},
]


def ask(messages: list) -> dict:
    body = json.dumps({"model": "any", "messages": messages, "tools": TOOLS, "temperature": 0.2}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


messages = [{"role": "user", "content": os.environ["ETUDE_TASK"]}]
while True:
    reply = ask(messages)
    messages.append(reply)
    for call in reply.get("tool_calls", []):
        if call["function"]["name"] == "submit":
            raise SystemExit(0)
        command = json.loads(call["function"]["arguments"]).get("command", "")
        done = subprocess.run(["etude-machine", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        print(f"$ {command}\n{done.stdout}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout or f"exit {done.returncode}"})
    if not reply.get("tool_calls"):
        messages.append({"role": "user", "content": "call a tool"})
