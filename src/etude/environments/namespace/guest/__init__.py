"""What runs on the far side of the exec: launcher, runner, tools. Standard library only, relative imports only.

The launcher process imports this folder under the name ``guest``, so nothing of etude and nothing of the parent's
memory is in the processes that agent code is forked from. Knows nothing of tasks, answers or rewards.
"""
