"""Remote machines over the HTTP API of E2B (e2b.dev), a service that runs sandboxes for agents: a client and a server.

The client, `RemoteRuntime`, is a `Runtime` whose machines are sandboxes of any service with this API: E2B, AgentENV,
CubeSandbox, or etude's own server. `create_app` and `serving` are that server, which the command `etude machines serve`
runs. It offers the machines of any etude runtime, with API keys, quotas and leases. E2B's client libraries work with it
unchanged.
"""

from etude.environments.remote.config import ClientConfig, ServerConfig
from etude.environments.remote.keys import Keyring, Quota
from etude.environments.remote.runtime import RemoteRuntime
from etude.environments.remote.sandboxes import Template
from etude.environments.remote.server import create_app, serving

__all__ = ["ClientConfig", "Keyring", "Quota", "RemoteRuntime", "ServerConfig", "Template", "create_app", "serving"]
