"""The operators of versions for people: `piccard status --verbose`."""

from typing import Any

from piccard_contract.operators import OperatorsReport
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_operators(found: dict[str, Any], console: Console) -> None:
    """Print what `piccard.status.status` found of the operators of each version."""
    for version in found["versions"]:
        if version.get("operators") is not None:
            _print(OperatorsReport.model_validate(version["operators"]), console)


def _print(report: OperatorsReport, console: Console) -> None:
    console.print(
        f"\n[bold]version {report.version}[/bold] on {report.device}, {report.precision}, runner {report.runner}:"
        f" {100 * report.fused_share:.0f} % of a decode step's operators are fused",
        highlight=False,
        soft_wrap=True,
    )
    operators = _table("operator", "served by", "shapes", "µs a step", "why")
    for use in report.operators:
        cost = "-" if use.microseconds is None else f"{use.microseconds:.1f}"
        mark = " (fallback)" if use.fallback else ""
        operators.add_row(
            escape(use.operator), escape(use.implementation) + mark, str(use.choices), cost, escape(use.reason)
        )
    console.print(operators)
    fusions = _table("fusion", "operators", "applies", "why not, or within what")
    for fusion in report.fusions:
        applies = "yes" if fusion.applies else f"no: {fusion.cause}"
        fusions.add_row(escape(fusion.name), str(fusion.operators), applies, escape(fusion.reason))
    console.print(fusions)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1], overflow="fold")
    return table
