"""Programs that a grader runs inside a machine, each as ``python -c``. Standard library only; never imported here."""
