import json
import threading
from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.engine_loop import EngineLoop
from deepseek_engine.request import EngineOutput, EngineRequest
from deepseek_engine.version import OpenVersion, open_version
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import VersionFile, VersionFileError


def open_with(folder: Path, home: Path | None = None, **settings: Any) -> tuple[OpenVersion, list[float]]:
    settings.setdefault("memory", "64MiB")
    (folder / "version.yaml").write_text(VersionFile.model_validate({"label": "v1", **settings}).dump())
    shares: list[float] = []
    return open_version(folder, number=1, home=home or folder, progress=shares.append), shares


def generate(version: OpenVersion, **params: Any) -> list[EngineOutput]:
    version.backend.add(EngineRequest("a", version.tokenizer.encode("def f"), SamplingParams(**params)))
    outputs: list[EngineOutput] = []
    while version.backend.has_work():
        outputs += version.backend.step()
    return outputs


def test_a_checkpoint_is_opened_ready_for_requests(tmp_path: Path, checkpoint: Path) -> None:
    version, shares = open_with(tmp_path, checkpoint=str(checkpoint), max_model_len=128, device="cpu")
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1
    assert (version.max_model_len, version.vocab_size, version.device) == (128, 320, "cpu")
    outputs = generate(version, max_tokens=5, temperature=0.0, ignore_eos=True)
    assert outputs[-1].num_output_tokens == 5
    assert outputs[-1].finish_reason == "length"


def test_profile_block_and_memory_shape_the_cache(tmp_path: Path, checkpoint: Path) -> None:
    small, _ = open_with(tmp_path, checkpoint=str(checkpoint), memory="2MiB", cache={"block": 16})
    large, _ = open_with(tmp_path, checkpoint=str(checkpoint), memory="2MiB", cache={"block": 64}, profile="throughput")
    blocks = small.backend.stats().total_blocks, large.backend.stats().total_blocks
    assert blocks[0] // 4 == pytest.approx(blocks[1], abs=1)
    more, _ = open_with(tmp_path, checkpoint=str(checkpoint), memory="4MiB", cache={"block": 16})
    assert more.backend.stats().total_blocks > blocks[0]


def test_the_loop_runs_it(tmp_path: Path, checkpoint: Path) -> None:
    version, _ = open_with(tmp_path, checkpoint=str(checkpoint))
    ended = threading.Event()
    texts: list[str] = []

    class Sink:
        def put(self, outputs: list[EngineOutput], *, last: bool) -> None:
            texts.extend(output.text for output in outputs)
            if last:
                ended.set()

        def fail(self, error: Exception) -> None:
            raise AssertionError(error)

    loop = EngineLoop(version.backend, on_fatal=lambda error: None)
    loop.start()
    loop.submit(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=4, seed=1)), Sink())
    assert ended.wait(60)
    loop.stop()


def test_every_layer_of_a_step_is_a_sign_of_life(tmp_path: Path, checkpoint: Path) -> None:
    version, _ = open_with(tmp_path, checkpoint=str(checkpoint))
    before = version.pulse.beats
    version.backend.add(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=1)))
    version.backend.step()
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    assert version.pulse.beats - before == layers


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"checkpoint": "nowhere"}, "nowhere"),
        ({"runner": "onnxruntime"}, "export is missing"),
        ({"cache": {"dtype": "float16"}}, "cache.dtype"),
        ({"memory": 1e-6}, "weights alone"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"max_model_len": 10**6}, "max_model_len"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path: Path, checkpoint: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        open_with(tmp_path, **{"checkpoint": str(checkpoint), **settings})


def test_a_folder_without_a_version_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"version\.yaml"):
        open_version(tmp_path, number=1, home=tmp_path, progress=lambda share: None)


def test_a_relative_checkpoint_is_sought_in_the_home(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "model").symlink_to(checkpoint)
    (tmp_path / "1").mkdir()
    version, _ = open_with(tmp_path / "1", tmp_path / "home", checkpoint="model")
    assert version.vocab_size == 320
    with pytest.raises(VersionFileError, match="not a folder"):
        open_with(tmp_path / "1", tmp_path / "home", checkpoint="other")
