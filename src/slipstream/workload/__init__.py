"""The recipe of the user's step: its file, its arguments and the techniques on top."""

from slipstream.workload.backup import file_backups, restore_files
from slipstream.workload.built import Applicable, BuiltWorkload, build_from, sort_by_stage
from slipstream.workload.drive import Program, drive, run_steps
from slipstream.workload.recipe import Workload

__all__ = [
    "Applicable",
    "BuiltWorkload",
    "Program",
    "Workload",
    "build_from",
    "drive",
    "file_backups",
    "restore_files",
    "run_steps",
    "sort_by_stage",
]
