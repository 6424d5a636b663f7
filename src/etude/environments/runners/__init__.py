"""Programs that the grader runs inside machines, each as ``python -c``.

They use the standard library only, and etude never imports them.
"""
