"""Grade what an agent leaves in its machine: check the exported files, then grade them in fresh machines."""

from etude.environments.grading.data import same
from etude.environments.grading.exports import (
    find_test_command_problem,
    prepare,
    reference_exports,
    simulate_exports,
    take_exports,
    validate_exports,
)
from etude.environments.grading.machine_grader import MachineGrader

__all__ = [
    "MachineGrader",
    "find_test_command_problem",
    "prepare",
    "reference_exports",
    "same",
    "simulate_exports",
    "take_exports",
    "validate_exports",
]
