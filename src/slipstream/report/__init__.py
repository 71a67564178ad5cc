"""The report of a step: a self-contained HTML file that draws a JSON document."""

from slipstream.report.write import write_report

__all__ = ["write_report"]
