"""What serves the operators of running versions, from the files that they write."""

from collections import defaultdict
from collections.abc import Iterator

from piccard_contract.home import Service, version_owner
from piccard_contract.operators import NOTHING, ONNX_RUNTIME, REFERENCE, OperatorsReport, OperatorUse, read_operators

from piccard.operation import sections_of


def live_operators(service: Service) -> dict[int, OperatorsReport]:
    """The reports of versions that run, by number. A file of a process that was killed tells nothing."""
    found = {}
    for owner, section in sorted(sections_of(service).items()):
        number = section.data.get("version")
        if not section.alive or not isinstance(number, int) or owner != version_owner(number):
            continue
        report = read_operators(service.operators_file(number))
        if report is not None and report.pid == section.pid:
            found[number] = report
    return found


def operator_notes(report: OperatorsReport) -> Iterator[str]:
    """Sentences for people: one on the whole, and one on each thing that costs time."""
    where = f"version {report.version} on {report.device} ({report.precision})"
    yield f"{where}: {'; '.join(_whole(report))}"
    for cause, uses in _fallbacks(report).items():
        yield f"{where}: {_told(report, uses)} by torch references on a GPU: {cause}"
    for use in report.operators:
        if use.implementation == NOTHING:
            yield f"{where}: steps failed, since nothing serves {use.operator}: {use.reason}"
    # On a CPU the device is in the way of them all.
    if report.device != "cpu":
        for reason, names in _unfused(report).items():
            yield f"{where}: not fused: {', '.join(names)}: {reason}"
    if report.captures or report.compilations:
        yield (
            f"{where}: {report.captures} graphs were captured and {report.compilations} kernels compiled since the"
            " warm-up, each a delay of a step; none should be: please report it with what was asked for"
        )


def _whole(report: OperatorsReport) -> Iterator[str]:
    names = {use.operator for use in report.operators if use.implementation == REFERENCE}
    exported = {use.operator for use in report.operators if use.implementation == ONNX_RUNTIME}
    others = (REFERENCE, ONNX_RUNTIME, NOTHING)
    kernels = {use.operator for use in report.operators if use.implementation not in others}
    if names or exported or kernels:
        parts = [f"{len(exported)} by ONNX Runtime"] if exported else []
        parts += [f"{len(kernels)} by device kernels"] if kernels else []
        parts += [f"{len(names)} by torch references"] if names else []
        yield "operators: " + ", ".join(parts)
    if report.fused_operators:
        yield f"{100 * report.fused_share:.0f} % of a decode step's operators are inside fused launches"
    if report.graphs:
        yield f"steps run from CUDA graphs ({report.replays} so far{_ungraphed(report)})"


def _ungraphed(report: OperatorsReport) -> str:
    told = ", ".join(f"{count} {cause}" for cause, count in sorted(report.ungraphed.items()))
    return f"; kernel by kernel: {told}" if told else ""


def _fallbacks(report: OperatorsReport) -> dict[str, list[OperatorUse]]:
    """Uses by their reason."""
    found: defaultdict[str, list[OperatorUse]] = defaultdict(list)
    for use in report.operators:
        if use.fallback:
            found[use.reason].append(use)
    return found


def _unfused(report: OperatorsReport) -> dict[str, list[str]]:
    """Fusions that would apply elsewhere, of operators that the model has, by their reason."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for fusion in report.fusions:
        if not fusion.applies and fusion.operators and fusion.cause not in ("side effects", "memory space"):
            found[fusion.reason].append(fusion.name)
    return found


def _told(report: OperatorsReport, uses: list[OperatorUse]) -> str:
    parts = []
    for use in uses:
        cost = "not measured" if use.microseconds is None else f"{use.microseconds:.0f} µs of a step"
        parts.append(f"{use.operator} ({cost}, {report.fallbacks.get(use.operator, 0)} steps)")
    return ", ".join(parts)
