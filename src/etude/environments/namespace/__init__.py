"""Machines made of Linux namespaces, control groups, limits and a system-call filter. The kernel is shared.

`runtime` hands out machines, `machine` talks to one over `channel`, `launcher` runs the process that makes them;
`guest` is the code on the other side, which never sees this one's memory.
"""

from etude.environments.namespace.runtime import NamespaceRuntime, probe

__all__ = ["NamespaceRuntime", "probe"]
