"""On a card: an export in onnxruntime-gpu says what the decoder of device kernels says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_kernels import ON_GPU

pytest.importorskip("triton")
from card_export import exported_decoder
from deepseek_engine.engine import Engine
from deepseek_engine.gpu.decoder import load_gpu_model
from deepseek_engine.gpu.device_model import DeviceModel
from deepseek_engine.gpu.memory_profile import profile_memory
from deepseek_engine.models import load_config
from deepseek_engine.request import EngineRequest
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_ops.exporter.weight_format import Int4Format
from device_kernels import DEVICE
from int4_checkpoints import dequantized_checkpoint
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids
from toy_tokenizer import toy_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]
DEMO = Path(__file__).parents[3] / "assets" / "demo"
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "for index, value in enumerate(",
    "def test_",
    "    return sum(x * x for x in ",
)
LONG_PROMPTS = ("    total += value * value\n" * 60, "def long_name(argument):\n    return argument\n\n\n" * 40)
SETTINGS = EngineSettings(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=512, prefill_gap=None)
"""Every step from graphs, where graphs are captured."""
LONG_STEPS = replace(SETTINGS, max_num_batched_tokens=2048)
TOKENS = 48
NEAR = 0.1
"""Of log-probabilities in bfloat16: what two ways to round the same sums may differ by."""
NEAR_PACKED = 0.2
"""The same where one side rounds every weight besides: products of one or two rows take packed ones in float32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceModel, DeviceModel]:
    config = load_config(DEMO)
    exported = exported_decoder(DEMO, config.num_hidden_layers, tmp_path_factory.mktemp("demo") / "export")
    return load_gpu_model(DEMO, config, dtype=torch.bfloat16, device=str(DEVICE)), exported


def continuations(
    model: DeviceModel, prompts: tuple[str, ...], settings: EngineSettings, *, capture: bool
) -> list[list[tuple[int, float, float]]]:
    """Of each prompt the tokens of a greedy continuation, their log-probabilities, and those of the next best."""
    runner = CudaRunner(model, settings)
    if capture:
        runner.capture()
    tokenizer = Tokenizer.from_folder(DEMO)
    engine = Engine(runner, tokenizer, settings)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    for place, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(place), tokenizer.encode(prompt), params))
    found: list[list[tuple[int, float, float]]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            told = output.logprobs or []
            for token, each in zip(output.token_ids, told, strict=True):
                values = sorted((entry.logprob for entry in each.values()), reverse=True)
                found[int(output.request_id)].append((token, values[0], values[1]))
    return found


def agree(
    got: list[list[tuple[int, float, float]]], expected: list[list[tuple[int, float, float]]], near: float = NEAR
) -> None:
    """Texts are the same up to a near tie, after which they are different ones."""
    agreed = 0
    for ours, theirs in zip(got, expected, strict=True):
        assert len(ours) == len(theirs) == TOKENS
        for (token, best, _), (other, value, second) in zip(ours, theirs, strict=True):
            if token != other:
                assert value - second < near
                break
            assert abs(best - value) < near
            agreed += 1
    assert agreed >= 0.6 * TOKENS * len(got)


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
def test_greedy_text_is_that_of_runner_torch(models: tuple[DeviceModel, DeviceModel], capture: bool) -> None:
    expected, got = (continuations(model, PROMPTS, SETTINGS, capture=capture) for model in models)
    agree(got, expected)


def test_prompts_beyond_the_graphs_too(models: tuple[DeviceModel, DeviceModel]) -> None:
    expected, got = (continuations(model, LONG_PROMPTS, LONG_STEPS, capture=False) for model in models)
    agree(got, expected)


def told_of_prompts(model: DeviceModel, settings: EngineSettings) -> torch.Tensor:
    """Log-probabilities of the tokens of three random prompts, and of greedy ones after them."""
    engine = Engine(CudaRunner(model, settings), toy_tokenizer(), settings)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    prompts = [random_token_ids(length, place) for place, length in enumerate((300, 301, 7))]
    for place, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(place), prompt, params))
    found: dict[str, list[float]] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            for place, told in enumerate(output.prompt_logprobs or []):
                if told is not None:
                    token = prompts[int(output.request_id)][place]
                    found.setdefault(output.request_id, []).append(told[token].logprob)
    assert {name: len(values) for name, values in found.items()} == {"0": 299, "1": 300, "2": 6}
    return torch.tensor([value for name in sorted(found) for value in found[name]])


@pytest.mark.parametrize("family", ["llama", "llama_bias", "qwen2"])
@pytest.mark.parametrize("settings", [SETTINGS, LONG_STEPS], ids=["short steps", "long steps"])
def test_grouped_heads_too(
    checkpoint_folder: Callable[[str], Path], tmp_path: Path, family: str, settings: EngineSettings
) -> None:
    folder = checkpoint_folder(family)
    exported = exported_decoder(folder, load_config(folder).num_hidden_layers, tmp_path / "export")
    torchs = load_gpu_model(folder, exported.config, dtype=torch.bfloat16, device=str(DEVICE))
    got, expected = (told_of_prompts(model, settings) for model in (exported, torchs))
    assert (got - expected).abs().mean() < NEAR / 2


def test_packed_weights_say_what_they_stand_for(tmp_path: Path) -> None:
    """Four bits on one side, the values that they are on the other."""
    packed, config = Int4Format(), load_config(DEMO)
    exported = exported_decoder(DEMO, config.num_hidden_layers, tmp_path / "export", format=packed)
    folder = dequantized_checkpoint(DEMO, tmp_path / "export", tmp_path / "unpacked", packed.group_size)
    torchs = load_gpu_model(folder, config, dtype=torch.bfloat16, device=str(DEVICE))
    for prompts, settings, capture in ((PROMPTS, SETTINGS, True), (LONG_PROMPTS, LONG_STEPS, False)):
        got, expected = (continuations(model, prompts, settings, capture=capture) for model in (exported, torchs))
        agree(got, expected, NEAR_PACKED)


def test_the_memory_profile_counts_what_is_not_torchs(models: tuple[DeviceModel, DeviceModel]) -> None:
    settings = replace(SETTINGS, num_blocks=None, max_model_len=512)
    exported = models[1]
    files = sum(path.stat().st_size for path in DEMO.glob("*.safetensors"))
    assert exported.outside_bytes() >= files
    profile = profile_memory(exported, settings)
    assert profile.weights >= exported.outside_bytes() > 0
    assert profile.fixed >= exported.outside_bytes()
