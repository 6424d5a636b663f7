"""An agent of the OpenAI Agents SDK with one tool, a shell in the machine of its rollout.

OPENAI_AGENTS_API = "responses" (default) or "chat_completions" says which API it speaks."""

from __future__ import annotations

import os
import subprocess

from agents import Agent, Runner, function_tool, set_default_openai_api


@function_tool
def shell(command: str) -> str:
    """Run a shell command and return its output."""
    argv = ["etude-machine", "-c", command]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


if __name__ == "__main__":
    set_default_openai_api(os.environ.get("OPENAI_AGENTS_API", "responses"))
    agent = Agent(name="engineer", instructions="Work with the shell.", tools=[shell], model="etude")
    print(Runner.run_sync(agent, os.environ["ETUDE_TASK"], max_turns=30).final_output)
