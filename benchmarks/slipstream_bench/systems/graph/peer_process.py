"""Run by the peer's own interpreter: times traceinsight with its process's CPU time.

``python bench_graph_peer_process.py TRACE INSTANCE`` answers each line of its input by a line of
JSON: seconds for the table of events, for the whole ``TraceAnalysis(...)``, and for the critical
path of one step. Nothing of slipstream is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def _cpu_s() -> float:
    # Its readers of several files are processes.
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def main(trace: str, instance: int) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # It prints as it goes.
    os.dup2(2, 1)
    from hta.common.trace_parser import parse_trace_dataframe  # type: ignore[import-not-found]
    from hta.configs.parser_config import ParserConfig  # type: ignore[import-not-found]
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    for _ in sys.stdin:
        began = _cpu_s()
        table: Any = parse_trace_dataframe(trace, ParserConfig.get_default_cfg())
        parsed = _cpu_s()
        del table
        again = _cpu_s()
        analysis: Any = TraceAnalysis(trace_files={0: trace}, trace_dir="")
        whole = _cpu_s()
        _, succeeded = analysis.critical_path_analysis(
            rank=0, annotation="ProfilerStep", instance_id=instance
        )
        path = _cpu_s()
        if not succeeded:
            return
        found = {"parse": parsed - began, "whole": whole - again, "path": path - whole}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
