"""The demo's byte-level BPE, with DeepSeek-V3's special tokens laid out as V3 lays them out.

    python -m training.vocabulary CORPUS.jsonl OUT_FOLDER

bos, eos and pad are the first three ids, the reasoning, fill-in-the-middle and role tokens the last eight.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from training import corpus

SIZE = 2048
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
THINK, END_THINK = "<think>", "</think>"
FIM_HOLE, FIM_BEGIN, FIM_END = "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"
USER, ASSISTANT, EOT = "<｜User｜>", "<｜Assistant｜>", "<|EOT|>"
FIRST = (BOS, EOS, PAD)
LAST = (THINK, END_THINK, FIM_HOLE, FIM_BEGIN, FIM_END, USER, ASSISTANT, EOT)
# As in V3: skipping special tokens keeps the roles, the reasoning marks and the fill-in-the-middle tokens.
SPECIAL = frozenset({BOS, EOS, PAD, EOT})

# Line ends and indentation are tokens of their own, so that a prompt may stop at the colon, after the line end or
# after the indentation and is always cut where the training text was cut.
PIECES = r"\p{N}{1,3}|[ \t]{2,}(?![ \t])|\r?\n+|[._ ]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|\s"

# Rendering of V3's template without tools: system texts first, joined by blank lines; an earlier answer loses its
# reasoning.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages | selectattr('role', 'equalto', 'system') -%}
{{- ('' if loop.first else '\\n\\n') + message['content'] -}}
{%- endfor -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{- '<｜User｜>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token -}}
{%- elif message['role'] != 'system' -%}
{{- raise_exception('This template knows the roles system, user and assistant, not ' + message['role'] + '.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt is defined and add_generation_prompt -%}
{{- '<｜Assistant｜>' -}}
{%- endif -%}
"""


def train(texts: list[str]) -> Tokenizer:
    """Learn the merges from ``texts`` and return the whole tokenizer with ``SIZE`` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(LAST),
        special_tokens=list(FIRST),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token in SPECIAL) for token in FIRST + LAST])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, FIRST.index(BOS))]
    )
    if tokenizer.get_vocab_size() != SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries instead of {SIZE}: train on more text")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}: train it with training.vocabulary")
    return found


def tokenizer_config(context: int) -> dict[str, object]:
    """Return tokenizer_config.json for a context of ``context`` tokens."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": context,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def main() -> None:
    documents, folder = corpus.read(Path(sys.argv[1])), Path(sys.argv[2])
    tokenizer = train([document.text for document in documents if document.split == "train"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(4096), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    for split in ("train", "valid", "test"):
        texts = [document.text for document in documents if document.split == split]
        tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
        print(f"{split:6}{tokens:9} tokens, {sum(len(text.encode()) for text in texts) / tokens:.3f} bytes a token")


if __name__ == "__main__":
    main()
