"""Attack programs that run in a machine, written with the standard library only.

The folder is copied into the machine, and ``python -m programs MODULE FUNCTION FACTS`` runs one function, whose
docstring describes the attack. It returns a proof of its success as text, such as the secret that it read, else "" or
None. It can also raise, since a defence may stop it with an error. The programs avoid damage: a file is opened for
writing but not written, a process gets signal 0.
"""
