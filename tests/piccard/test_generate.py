"""`piccard generate` runs a checkpoint without a server."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def generate(command_line: Piccard) -> Piccard:
    return lambda *arguments: command_line("generate", *arguments)


def test_text_streams_and_json_tells_the_same(checkpoint: Path, generate: Piccard) -> None:
    arguments = (str(checkpoint), "--prompt=hello", "--max-tokens=6", "--device=cpu")
    text = generate(*arguments)
    assert text.returncode == 0, text.stderr
    told = json.loads(generate(*arguments, "--json").stdout)
    assert text.stdout == f"hello{told['text']}\n"
    assert told["completion_tokens"] == 6
    assert told["finish_reason"] == "length"
    assert "6 tokens in" in text.stderr


def test_seed_decides(checkpoint: Path, generate: Piccard) -> None:
    arguments = (str(checkpoint), "--max-tokens=8", "--temperature=1.5", "--json", "--device=cpu")
    texts = [json.loads(generate(*arguments, f"--seed={seed}").stdout)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max-tokens=100000",), "lower max_tokens"),
        (("--top-p=0",), "top_p"),
        (("--profile=fast",), "profile"),
        (("--device=cuda:77",), "cuda:77"),
    ],
)
def test_refusal_is_a_sentence(checkpoint: Path, generate: Piccard, arguments: tuple[str, ...], told: str) -> None:
    result = generate(str(checkpoint), *arguments)
    assert result.returncode in (1, 2)
    assert told in result.stderr
    assert "Traceback" not in result.stderr
