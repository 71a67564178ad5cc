"""Time traceinsight in the peer's interpreter, by the CPU time of its process.

``python peer_process.py TRACE INSTANCE`` answers each line of its input with a line of JSON, in
seconds: ``parse`` builds the table of events, ``whole`` the whole ``TraceAnalysis(...)``, and
    ``path`` the critical path of one step. It imports nothing of slipstream.
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
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # traceinsight prints while it runs.
    os.dup2(2, 1)
    from hta.common.trace_parser import parse_trace_dataframe  # type: ignore[import-not-found]
    from hta.configs.parser_config import ParserConfig  # type: ignore[import-not-found]
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    analysis: Any = TraceAnalysis(trace_files={0: trace}, trace_dir="")
    for line in sys.stdin:
        began = _cpu_s()
        match line.strip():
            case "parse":
                parse_trace_dataframe(trace, ParserConfig.get_default_cfg())
            case "whole":
                TraceAnalysis(trace_files={0: trace}, trace_dir="")
            case "path":
                _, succeeded = analysis.critical_path_analysis(
                    rank=0, annotation="ProfilerStep", instance_id=instance
                )
                if not succeeded:
                    return
        answers.write(json.dumps(_cpu_s() - began) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
