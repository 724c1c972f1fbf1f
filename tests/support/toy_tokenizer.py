"""A tokenizer of single bytes, so that most characters beyond ASCII are split over tokens."""

import json
from pathlib import Path

import tokenizers
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.text.tokenizer_files import TokenizerFiles
from tokenizers import decoders, models, pre_tokenizers

BOS, EOS = 256, 257


def toy_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes in the order of ByteLevel's alphabet, then <bos> and <eos>."""
    files = TokenizerFiles(
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        extra_special_tokens=(),
        add_bos_token=True,
        tokenizer_class="",
        bos_token_id=None,
        eos_token_ids=(),
        chat_templates={},
    )
    return Tokenizer(_core(), files, "toy")


def write_toy_tokenizer(folder: Path) -> None:
    """Put the same tokenizer into a checkpoint's folder."""
    _core().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _core() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<bos>", "<eos>"])
    return core
