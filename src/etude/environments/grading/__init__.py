"""Judging what comes out of a machine: exports as validated data, fresh machines, runners and comparisons of ours."""

from etude.environments.grading.data import same
from etude.environments.grading.exports import (
    exports_of,
    prepare,
    reference_exports,
    start_fault,
    take_exports,
    validate_exports,
)
from etude.environments.grading.machine_grader import MachineGrader

__all__ = [
    "MachineGrader",
    "exports_of",
    "prepare",
    "reference_exports",
    "same",
    "start_fault",
    "take_exports",
    "validate_exports",
]
