"""Programs that the grader runs inside machines, each as ``python -c``. Standard library only; never imported by
etude."""
