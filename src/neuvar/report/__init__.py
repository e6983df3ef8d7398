"""Turn results into figures, tables and one page. Nothing here trains."""

from neuvar.report.documents import insert
from neuvar.report.figures import draw
from neuvar.report.gather import Claim, Finding, gather, load
from neuvar.report.markdown import report_markdown, summary_markdown, table_markdown
from neuvar.report.writing import Report, write, write_claims

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
