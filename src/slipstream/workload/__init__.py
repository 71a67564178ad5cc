"""The recipe of what the user runs: where it is, its arguments, the techniques on top."""

from slipstream.workload.built import Applicable, Built, build_from, in_order
from slipstream.workload.drive import Program, drive, run_steps
from slipstream.workload.kept import kept_files, restore_files
from slipstream.workload.recipe import Workload

__all__ = [
    "Applicable",
    "Built",
    "Program",
    "Workload",
    "build_from",
    "drive",
    "in_order",
    "kept_files",
    "restore_files",
    "run_steps",
]
