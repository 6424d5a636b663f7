"""Attack programs that run in a machine. They use only the standard library.

The folder is copied into the machine, and ``python -m programs MODULE FUNCTION FACTS`` runs a function. Its docstring
describes the attack. It returns what it got as text, "" if it failed, and can raise, since a defence may stop it with
an error. The programs avoid damage: a file is opened for writing but not written, a process gets signal 0.
"""
