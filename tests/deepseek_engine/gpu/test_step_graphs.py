import pytest
import torch
from deepseek_engine.gpu.step_graphs import StepGraphs
from device_kernels import DEVICE, ON_GPU

CPU = torch.device("cpu")


def counting(results):
    """A function that tells how often it has run, and its calls."""
    calls = []

    def function():
        calls.append(1)
        return results

    return function, calls


def test_without_a_gpu_the_functions_themselves_run():
    graphs = StepGraphs(CPU)
    function, calls = counting(3)
    graphs.capture("a", function)
    assert len(calls) == 1, "what it needs is compiled and allocated"
    assert graphs.run("a") == 3
    assert graphs.run("a", eager=True) == 3
    assert len(calls) == 3
    assert (graphs.captures, graphs.replays) == (0, 0)


def test_a_function_may_run_under_a_key_without_a_graph():
    graphs = StepGraphs(CPU)
    function, calls = counting("x")
    assert "a" not in graphs
    graphs.define("a", function)
    assert "a" in graphs
    assert not calls
    assert graphs.run("a") == "x"
    assert (graphs.captures, graphs.replays) == (0, 0)


def test_an_unknown_key_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        StepGraphs(CPU).run("nothing")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_replay_reads_what_the_inputs_hold_then():
    graphs: StepGraphs[torch.Tensor] = StepGraphs(DEVICE)
    x = torch.zeros(8, device=DEVICE)
    graphs.capture("double", lambda: x * 2)
    graphs.capture("next", lambda: x + 1)
    assert graphs.captures == 2
    for value in (3.0, 4.0):
        x.fill_(value)
        assert graphs.run("double").tolist() == [2 * value] * 8
        assert graphs.run("next").tolist() == [value + 1] * 8
        assert graphs.run("double", eager=True).tolist() == [2 * value] * 8
    assert (graphs.captures, graphs.replays) == (2, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_what_is_defined_only_is_no_replay():
    graphs: StepGraphs[torch.Tensor] = StepGraphs(DEVICE)
    x = torch.ones(4, device=DEVICE)
    graphs.define("a", lambda: x + 1)
    assert graphs.run("a").tolist() == [2.0] * 4
    assert (graphs.captures, graphs.replays) == (0, 0)
