"""Machines made of Linux namespaces, control groups, limits and a system-call filter. The kernel is shared.

`runtime` hands out machines, `machine` uses one, `launcher` talks to the processes that make them and run commands;
`guest` is the code over there, which never sees this process's memory.
"""

from etude.environments.namespace.runtime import NamespaceRuntime, probe

__all__ = ["NamespaceRuntime", "probe"]
