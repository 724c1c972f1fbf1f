"""Counts of many processes become the server's metrics, and nothing is ever counted twice or lost."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.metrics_export import STALE, Kind, MetricsExport, Series
from piccard_contract.live_state import Section


class Held:
    """A metric of the server."""

    def __init__(self) -> None:
        self.held = 0.0
        self.calls = 0

    def value(self) -> float:
        return self.held

    def increment(self, by: float) -> None:
        assert by > 0
        self.held += by
        self.calls += 1

    def set(self, value: float) -> None:
        self.held = value
        self.calls += 1


class Server:
    """The server's metrics, by name and labels."""

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, str], Held] = defaultdict(Held)
        self.kinds: dict[str, Kind] = {}

    def series(self, name: str, kind: Kind, help: str, labels: dict[str, str]) -> Series:
        assert help.endswith(".")
        assert self.kinds.setdefault(name, kind) == kind
        return self.metrics[name, ",".join(f"{key}={labels[key]}" for key in sorted(labels))]

    def clear(self) -> None:
        self.metrics.clear()

    def held(self, name: str) -> float:
        return sum(metric.held for (found, _), metric in self.metrics.items() if found == name)


def section(owner: str, pid: int, *, alive: bool = True, **values: float) -> Section:
    samples = [[name, {"service": "deepseek", "version": "1"}, value] for name, value in values.items()]
    return Section(owner, pid, 0.0, alive, {"samples": samples})


def test_counters_of_all_processes_add_up() -> None:
    server = Server()
    export = MetricsExport(server)
    export.export(
        [section("router", 1, piccard_requests_total=5), section("router_unary", 2, piccard_requests_total=2)]
    )
    assert server.held("piccard_requests_total") == 7

    export.export(
        [section("router", 1, piccard_requests_total=6), section("router_unary", 2, piccard_requests_total=2)]
    )
    assert server.held("piccard_requests_total") == 8


def test_what_a_dead_process_counted_stays() -> None:
    server = Server()
    export = MetricsExport(server)
    export.export([section("version-1", 1, piccard_prompt_tokens_total=50)])
    export.export([section("version-1", 1, alive=False, piccard_prompt_tokens_total=50)])
    assert server.held("piccard_prompt_tokens_total") == 50

    export.export([section("version-1", 9, piccard_prompt_tokens_total=3)])
    assert server.held("piccard_prompt_tokens_total") == 53
    # Its section may be taken by another process.
    export.export([])
    assert server.held("piccard_prompt_tokens_total") == 53


def test_gauges_are_of_the_living() -> None:
    server = Server()
    export = MetricsExport(server)
    export.export([section("router", 1, piccard_in_flight=4), section("router_unary", 2, piccard_in_flight=1)])
    assert server.held("piccard_in_flight") == 5

    export.export(
        [section("router", 1, alive=False, piccard_in_flight=4), section("router_unary", 2, piccard_in_flight=1)]
    )
    assert server.held("piccard_in_flight") == 1
    export.export([])
    assert server.held("piccard_in_flight") == 0


def test_a_histogram_travels_as_counters() -> None:
    server = Server()
    values = {
        "piccard_first_token_seconds_bucket": 2.0,
        "piccard_first_token_seconds_sum": 0.5,
        "piccard_first_token_seconds_count": 2.0,
    }
    MetricsExport(server).export([section("router", 1, **values)])

    assert {name: server.held(name) for name in values} == values
    assert set(server.kinds.values()) == {"counter"}


def test_what_is_not_in_the_table_is_left_out() -> None:
    server = Server()
    MetricsExport(server).export([section("version-1", 1, piccard_of_tomorrow_total=1, piccard_in_flight_count=1)])

    assert server.metrics == {}


def test_nothing_new_is_no_message() -> None:
    server = Server()
    export = MetricsExport(server)
    same = [section("router", 1, piccard_requests_total=5, piccard_in_flight=2)]
    for _ in range(3):
        export.export(same)

    assert [metric.calls for metric in server.metrics.values()] == [1, 1]


def of_version(owner: str, pid: int, version: int, **values: float) -> Section:
    samples = [[name, {"service": "deepseek", "version": str(version)}, value] for name, value in values.items()]
    return Section(owner, pid, 0.0, True, {"samples": samples})


def test_series_of_forgotten_versions_end() -> None:
    """Without an end, /metrics and the exporter would grow with every version that ever was."""
    server = Server()
    export = MetricsExport(server)
    sizes = []
    for version in range(10, 2000):
        sections = [
            # Sections of earlier processes are still there, and routers forget a moment later.
            of_version("version-1", 7, 1, piccard_prompt_tokens_total=5, piccard_sequences_running=1),
            of_version("router", 1, version, piccard_requests_total=version, piccard_in_flight=1),
            *(of_version(f"version-{n}", n, n, piccard_prompt_tokens_total=5) for n in range(version - 3, version + 1)),
        ]
        export.export(sections, known={1, version, version - 1})
        sizes.append(len(server.metrics))

    assert max(sizes) < 2 * STALE
    assert max(sizes[1000:]) <= max(sizes[:1000])
    assert server.metrics["piccard_prompt_tokens_total", "service=deepseek,version=1"].held == 5
    assert server.metrics["piccard_sequences_running", "service=deepseek,version=1"].held == 1
    assert server.metrics["piccard_requests_total", "service=deepseek,version=1999"].held == 1999


def test_counters_go_on_in_new_families() -> None:
    """Whoever reads /metrics sees no counter fall, also of what an earlier exporter counted."""
    server = Server()
    MetricsExport(server).export([of_version("router", 1, 1, piccard_requests_total=5)], known={1})
    export = MetricsExport(server)
    cleared = 0
    for version in range(2, 3 * STALE):
        before = len(server.metrics)
        sections = [
            of_version("router", 2, 1, piccard_requests_total=version),
            of_version("router_unary", 3, version, piccard_in_flight=1),
        ]
        export.export(sections, known={1, version})
        cleared += len(server.metrics) < before
        assert server.metrics["piccard_requests_total", "service=deepseek,version=1"].held == 3 + version
    assert cleared


def test_what_has_no_version_is_never_forgotten() -> None:
    server = Server()
    export = MetricsExport(server)
    export.export([Section("admission", 1, 0.0, True, {"samples": [["piccard_unsigned_claims_total", {}, 3.0]]})], {1})
    export.export([of_version("router", 2, 7, piccard_requests_total=4)], known=None)

    assert server.held("piccard_unsigned_claims_total") == 3
    assert server.held("piccard_requests_total") == 4


def test_owners_of_forgotten_versions_are_forgotten() -> None:
    export = MetricsExport(Server())
    for version in range(1, 50):
        export.export([of_version(f"version-{version}", version, version, piccard_prompt_tokens_total=2)], {version})

    assert len(export._owners) == 1


def test_a_second_exporter_goes_on_where_the_first_ended() -> None:
    server = Server()
    first = MetricsExport(server)
    first.export([section("router", 1, piccard_requests_total=5)])
    first.export([section("router", 2, piccard_requests_total=1)])
    # The new one does not know of process 1, whose 5 the server holds.
    second = MetricsExport(server)
    second.export([section("router", 2, piccard_requests_total=1)])
    assert server.held("piccard_requests_total") == 6

    second.export([section("router", 2, piccard_requests_total=4)])
    assert server.held("piccard_requests_total") == 9


@given(st.lists(st.tuples(st.sampled_from(["router", "router_unary"]), st.integers(0, 5), st.booleans()), max_size=30))
def test_every_count_is_exported_once(steps: list[tuple[str, int, bool]]) -> None:
    server = Server()
    export = MetricsExport(server)
    pids, counts, total = {"router": 1, "router_unary": 2}, {"router": 0, "router_unary": 0}, 0
    for owner, more, restarts in steps:
        if restarts:
            pids[owner] += 10
            counts[owner] = 0
        counts[owner] += more
        total += more
        export.export([section(o, pids[o], piccard_requests_total=counts[o]) for o in pids])

        assert server.held("piccard_requests_total") == total
