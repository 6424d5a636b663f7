"""Machines made of Linux namespaces, control groups, resource limits and a system-call filter; they share the host's
kernel.

`runtime` forks machines, `machine` is one of them, and `launcher` talks to the processes that create machines and run
commands. `guest` is the code of those processes; it never sees this process's memory.
"""

from etude.environments.namespace.runtime import NamespaceRuntime, probe

__all__ = ["NamespaceRuntime", "probe"]
