"""Machines under gVisor: a user-space kernel between the machine's programs and the host. Needs `runsc`.

`runtime` forks machines, `sandbox` is the process of one machine, `bundle` makes its root folder and configuration.
"""

from etude.environments.gvisor.runtime import GVisorRuntime

__all__ = ["GVisorRuntime"]
