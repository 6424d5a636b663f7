"""The code of the processes that agent code is forked from. Standard library and relative imports only.

The launcher process imports this folder under the name ``guest``. So these processes contain nothing of etude and
nothing of the parent's memory. Tasks, answers and rewards are not known here.

Each live machine has a *slot*, a small number that is reused after its end. A slot has its own user ids on the host and
its own control groups.
"""
