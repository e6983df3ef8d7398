"""Turn results into figures, tables and one page. Nothing here trains."""

from neuvar.report.documents import report_markdown, summary_markdown, table_markdown
from neuvar.report.figures import draw
from neuvar.report.files import Report, insert, write
from neuvar.report.gather import Claim, Finding, gather_claims, load

__all__ = [
    "Claim",
    "Finding",
    "Report",
    "draw",
    "gather_claims",
    "insert",
    "load",
    "report_markdown",
    "summary_markdown",
    "table_markdown",
    "write",
]
