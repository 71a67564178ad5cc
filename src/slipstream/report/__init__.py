"""One page about a step: a self-contained HTML file, drawn from a JSON document."""

from slipstream.report.write import write_report

__all__ = ["write_report"]
