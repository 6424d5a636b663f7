"""What a cheat does in its machine: programs that really try. Standard library only; they run over there.

The folder travels whole: ``python -m programs MODULE FUNCTION FACTS`` runs one. A function says in its docstring what
it tries, returns what it got as text, "" for nothing, and may raise: a defence that stops it by an error is a defence.
Nothing is broken to prove a point: what could be written is opened, what could be killed is sent signal 0.
"""
