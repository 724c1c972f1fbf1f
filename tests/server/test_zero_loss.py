"""No request is lost, cut short or answered by two versions while versions are promoted, published and retired."""

from collections.abc import Callable

import pytest
from piccard_server import RunningServer
from zero_loss import audited, disagreements, run_without_loss

CYCLES = 20
PUBLICATIONS = 5


# Streams beside some that ask for a single answer.
STREAMS = 16
UNARY = 4

KILLS = 2


# Takes 80 s on two quiet cores, and some minutes on busy ones.
@pytest.mark.timeout(1800)
def test_two_operators_and_sixteen_streams(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(traffic_ratio=0.1)
    outcome = run_without_loss(
        server, streams=STREAMS, unary=UNARY, requests=2000, cycles=CYCLES, publications=PUBLICATIONS
    )

    assert not outcome.faults, "\n".join(outcome.faults[:20])
    assert outcome.total >= 2000
    assert set(outcome.requests) == {"grpc_stream", "grpc_unary", "http_infer", "generate_stream"}
    # Both of the first two served, and nobody started one of them again.
    assert min(outcome.served[1], outcome.served[2]) > 0
    assert sum(outcome.initialisations.values()) == PUBLICATIONS + outcome.revivals
    assert outcome.revivals == 0
    assert outcome.initialisations == {1: 0, 2: 0, **dict.fromkeys(range(3, 3 + PUBLICATIONS), 1)}
    done = audited(server)
    assert (done["promote"], done["rollback"]) == (CYCLES, CYCLES)
    assert (done["publish"], done["retire"]) == (PUBLICATIONS, PUBLICATIONS)
    assert done["failed"] == 0
    assert disagreements(server) == []


@pytest.mark.timeout(900)
def test_the_canary_is_killed_under_load(fresh_server: Callable[..., RunningServer]) -> None:
    server = fresh_server(traffic_ratio=0.1)
    # Tokens are far between: the more often a version sends, the likelier it takes this server with it.
    outcome = run_without_loss(
        server, streams=STREAMS, unary=UNARY, requests=300, cycles=0, publications=1, kills=KILLS, delay=0.1
    )

    assert not outcome.faults, "\n".join(outcome.faults[:20])
    assert outcome.resumed > 0
    assert outcome.revivals == KILLS
    assert outcome.initialisations == {1: 0, 2: KILLS, 3: 1}
    assert disagreements(server) == []
