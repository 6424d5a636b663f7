"""The processes that agent code is forked from: launcher, runner and command processes. Standard library and relative
imports only.

The launcher process imports this folder under the name ``guest``. So these processes contain nothing of etude and
nothing of the parent's memory. Tasks, answers and rewards are not known here.
"""
