"""Turn results into figures, tables and one page. Nothing here trains."""

from neuvar.report.figures import draw
from neuvar.report.files import Report, insert, write, write_claims
from neuvar.report.gather import Claim, Finding, gather, load
from neuvar.report.markdown import report_markdown, summary_markdown, table_markdown

__all__ = [
    "Claim",
    "Finding",
    "Report",
    "draw",
    "gather",
    "insert",
    "load",
    "report_markdown",
    "summary_markdown",
    "table_markdown",
    "write",
    "write_claims",
]
