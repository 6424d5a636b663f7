"""An environment of mini-swe-agent whose commands run in the machine of the rollout, without a process for each.

mini-swe-agent takes it by its import path, with this folder on PYTHONPATH:

    environment.environment_class = mini_machine.Machine"""

from __future__ import annotations

import http.client
import json
import os
from typing import Any
from urllib.parse import urlsplit

from minisweagent.environments.local import LocalEnvironment


class Machine(LocalEnvironment):
    """Executes commands through `ETUDE_MACHINE_URL`, each within `timeout` and `harness.tool_deadline_s`."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command, and return its output, exit code, and why it was not run to its end ("" if it was)."""
        url = urlsplit(os.environ["ETUDE_MACHINE_URL"])
        order = {
            "command": action.get("command", ""),
            "cwd": cwd or self.config.cwd,
            "env": self.config.env,
            "timeout_s": timeout or self.config.timeout,
        }
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("POST", f"{url.path}/exec", json.dumps(order), {"content-type": "application/json"})
        done = json.load(connection.getresponse())
        connection.close()
        if "error" in done:
            raise RuntimeError(done["error"]["message"])
        late = "timed out" if done["timed_out"] else ""
        output = {"output": done["output"], "returncode": done["exit_code"], "exception_info": late}
        self._check_finished(output)
        return output
