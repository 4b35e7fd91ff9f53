"""Rows that a report should have left out."""

from array import array

from rlhf_ray.data.load_report import LeftOut, LoadReport


def left_out(report: LoadReport, *lines: int) -> LeftOut:
    """These lines of the report's only file."""
    return LeftOut({report.source: array("q", lines)})
