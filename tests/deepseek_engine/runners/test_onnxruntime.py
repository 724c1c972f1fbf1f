"""The runner on ONNX Runtime: what an engine says with it, and what it refuses to run."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from deepseek_engine.departures import Interrupt, StepGivenUpError
from deepseek_engine.engine import Engine
from deepseek_engine.models import Model, load_config, load_model
from deepseek_engine.request import EngineOutput, EngineRequest
from deepseek_engine.runners.onnx_graph import MODEL_FILE, ExportError, check_cache_stays
from deepseek_engine.runners.onnxruntime import OnnxModel
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, StepPlan, StepRow
from onnx import helper
from paged_sequences import PagedSequences
from patience import wait_until
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from toy_tokenizer import toy_tokenizer

FAMILIES = ("v2_lite", "v3", "llama")
REQUESTS = (
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(max_tokens=15, temperature=0.0, ignore_eos=True, repetition_penalty=1.3),
)

Folders = Callable[[str], Path]


@pytest.fixture
def exported(library: Path, checkpoint_folder: Folders, export_folder: Folders) -> Callable[[str], OnnxModel]:
    return lambda family: OnnxModel(export_folder(family), library, load_config(checkpoint_folder(family)), threads=1)


def answers(model: Model) -> dict[str, list[EngineOutput]]:
    """Requests that come while others run, in chunks that are smaller than their prompts."""
    settings = EngineSettings(num_blocks=40, max_num_batched_tokens=24, prefill_chunk=16, max_num_seqs=4)
    engine = Engine(TorchRunner(model, settings), toy_tokenizer(), settings)
    outputs: dict[str, list[EngineOutput]] = {}
    waiting = [(str(index), random_token_ids(21 + 8 * index, index), params) for index, params in enumerate(REQUESTS)]
    while waiting or engine.has_work():
        if waiting:
            engine.add(EngineRequest(*waiting.pop(0)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_says_what_it_says_with_torch(
    exported: Callable[[str], OnnxModel], checkpoint_folder: Folders, family: str
) -> None:
    expected = answers(load_model(checkpoint_folder(family), dtype=torch.float32))
    got = answers(exported(family))
    assert got.keys() == expected.keys()
    for name, outputs in expected.items():
        tokens = [[token for output in side for token in output.token_ids] for side in (got[name], outputs)]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == REQUESTS[int(name)].max_tokens
        assert got[name][-1].finish_reason == outputs[-1].finish_reason == "length"


def test_the_cache_is_written_in_place(exported: Callable[[str], OnnxModel], checkpoint_folder: Folders) -> None:
    models = (exported("v3"), load_model(checkpoint_folder("v3"), dtype=torch.float32))
    sides = [PagedSequences(model, [50, 20]) for model in models]
    places = {name: plane.data_ptr() for name, plane in sides[0].cache.items()}
    for chunks in ({0: random_token_ids(33, 0), 1: random_token_ids(7, 1)}, {0: [5], 1: [6]}, {1: [7]}):
        for side in sides:
            side.step(chunks)
    for name, plane in sides[1].cache.items():
        assert sides[0].cache[name].data_ptr() == places[name]
        torch.testing.assert_close(sides[0].cache[name], plane, atol=2e-4, rtol=2e-4)
        assert plane.abs().sum() > 0


def test_another_cache_is_bound_anew(exported: Callable[[str], OnnxModel]) -> None:
    model = exported("v3")
    tokens = {0: random_token_ids(18, 3)}
    first = PagedSequences(model, [40]).step(tokens)[0]
    assert torch.equal(PagedSequences(model, [80], seed=5).step(tokens)[0], first)


def test_every_operator_of_a_step_is_a_sign_of_life(exported: Callable[[str], OnnxModel]) -> None:
    model = exported("v3")
    before = model.computed()
    PagedSequences(model, [10]).step({0: [1, 2, 3]})
    assert model.computed() - before >= 8 * model.config.num_hidden_layers


def prompt_step(model: OnnxModel, interrupt: Interrupt | None, length: int = 500) -> list[list[int]]:
    """What a prompt samples, in one step of a runner of its own."""
    runner = TorchRunner(model, EngineSettings(num_blocks=64))
    ids = random_token_ids(length, 7)
    row = StepRow(0, ids, 0, list(range(-(-length // 16))), sample=True)
    new = NewSequence(0, SamplingParams(temperature=0.0), ids, [], 0, (), 1)
    return runner.collect(runner.execute(StepPlan([row], new=[new]), interrupt)).token_ids


def test_a_step_that_nobody_waits_for_ends_between_two_nodes(exported: Callable[[str], OnnxModel]) -> None:
    model = exported("v3")
    expected = prompt_step(model, Interrupt())
    whole = model.computed()
    prompt_step(model, None)
    whole = model.computed() - whole

    early = Interrupt()
    early.set()
    before = model.computed()
    with pytest.raises(StepGivenUpError):
        prompt_step(model, early)
    assert model.computed() == before

    def given_up() -> bool:
        """Whether another thread, once the first operators are done, was in time to end the step."""
        before, interrupt, over = model.computed(), Interrupt(), threading.Event()

        def interfere() -> None:
            while not over.is_set() and model.computed() == before:
                pass
            interrupt.set()

        thread = threading.Thread(target=interfere)
        thread.start()
        try:
            prompt_step(model, interrupt)
        except StepGivenUpError:
            return before < model.computed() < before + whole
        finally:
            over.set()
            thread.join()
        return False

    wait_until(given_up)
    # The session is as good as new.
    assert prompt_step(model, Interrupt()) == expected


def test_an_export_of_another_checkpoint_is_refused(
    library: Path, checkpoint_folder: Folders, export_folder: Folders
) -> None:
    config = load_config(checkpoint_folder("v3"))
    with pytest.raises(ExportError, match="the export is of another checkpoint"):
        OnnxModel(export_folder("llama"), library, config, threads=1)


def test_what_cannot_be_opened_is_named(
    library: Path, checkpoint_folder: Folders, export_folder: Folders, tmp_path: Path
) -> None:
    config = load_config(checkpoint_folder("v3"))
    damaged = shutil.copytree(export_folder("v3"), tmp_path / "damaged")
    (damaged / "layer_001.data").write_bytes(b"short")
    with pytest.raises(ExportError, match=r"damaged/model\.onnx cannot be opened"):
        OnnxModel(damaged, library, config, threads=1)
    (damaged / MODEL_FILE).write_bytes(b"nothing of the kind")
    with pytest.raises(ExportError, match=r"damaged/model\.onnx cannot be read"):
        OnnxModel(damaged, library, config, threads=1)
    with pytest.raises(ExportError, match=r"no\.so"):
        OnnxModel(export_folder("v3"), tmp_path / "no.so", config, threads=1)


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_graph_that_copies_its_cache_is_refused(export_folder: Folders, tmp_path: Path, side: str) -> None:
    whole = export_folder("v3") / MODEL_FILE
    check_cache_stays(whole)
    model = onnx.load(whole, load_external_data=False)
    attention = next(node for node in model.graph.node if "latent_1" in node.input)
    names, name = (attention.input, "latent_1") if side == "input" else (attention.output, "latent_1_out")
    names[list(names).index(name)] = "copied"
    ends = [name, "copied"] if side == "input" else ["copied", name]
    model.graph.node.append(helper.make_node("Cast", ends[:1], ends[1:], name="the_cast", to=onnx.TensorProto.FLOAT))
    path = tmp_path / MODEL_FILE
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ExportError, match="node 'the_cast', a Cast, copies the cache latent_1 in each step"):
        check_cache_stays(path)
