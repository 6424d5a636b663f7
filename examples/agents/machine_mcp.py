"""A server of the Model Context Protocol with one tool, a shell in the machine of its rollout.

For agents whose own shell cannot be replaced. Needs the package `mcp`, version 2."""

from __future__ import annotations

import subprocess

from mcp.server.mcpserver import MCPServer

server = MCPServer("machine")


@server.tool()
def shell(command: str) -> str:
    """Run a shell command and return its output."""
    argv = ["etude-machine", "-c", command]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"


if __name__ == "__main__":
    server.run()
