"""Records to tables, pictures and one self-contained page; pure functions of a run's files."""

from splitveil.report.deck import write_deck
from splitveil.report.page import ReportContent, read_runs, render, write_report

__all__ = ["ReportContent", "read_runs", "render", "write_deck", "write_report"]
