"""The demo checkpoint: its layout, its tokenizer, and that it is a trained model of Python."""

import ast
import inspect
import json
import struct
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2.exceptions
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, DeepseekV3ForCausalLM

DEMO = Path(__file__).parents[2] / "assets" / "demo"
REPOSITORY_BYTES = 16_000_000
SHARD_BYTES = 8_000_000
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
HOLE, BEGIN, END = "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
LAST_TOKENS = ["<think>", "</think>", HOLE, BEGIN, END, USER, ASSISTANT, "<|EOT|>"]


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((DEMO / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor, read from the shards' headers."""
    found = {}
    for shard in sorted(DEMO.glob("*.safetensors")):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        found.update(
            {name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        )
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded() -> tuple[DeepseekV3ForCausalLM, dict[str, Any]]:
    """The model in fp32 and transformers' account of the load."""
    torch.set_num_threads(1)
    return DeepseekV3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32, output_loading_info=True)


@pytest.fixture(scope="module")
def complete(loaded: tuple[DeepseekV3ForCausalLM, dict[str, Any]], tokenizer: Tokenizer) -> Callable[[str, int], str]:
    """Greedy completion of a text."""

    def run(prompt: str, count: int) -> str:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        out = loaded[0].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)

    return run


def test_the_checkpoint_fits_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "."], cwd=DEMO, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name]
    assert sum((DEMO / name).stat().st_size for name in names) <= REPOSITORY_BYTES


def test_shards_are_small_and_the_index_names_every_tensor(tensors: dict[str, tuple[str, list[int]]]) -> None:
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    shards = sorted(DEMO.glob("*.safetensors"))
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert all(shard.stat().st_size <= SHARD_BYTES for shard in shards)
    assert set(index["weight_map"]) == set(tensors)
    widths = {"BF16": 2, "F32": 4}
    assert index["metadata"]["total_size"] == sum(
        widths[dtype] * torch.Size(shape).numel() for dtype, shape in tensors.values()
    )


def test_config_is_a_v3_model_with_every_feature(config: dict[str, Any]) -> None:
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["topk_group"] < config["n_group"]
    assert config["first_k_dense_replace"] < config["num_hidden_layers"]
    assert config["q_lora_rank"]
    assert config["max_position_embeddings"] >= 4096


def test_only_correction_biases_are_fp32(tensors: dict[str, tuple[str, list[int]]]) -> None:
    wide = {name for name, (dtype, _) in tensors.items() if dtype != "BF16"}
    assert wide == {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert wide


def test_the_mtp_layer_has_its_real_names(config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]]) -> None:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    last, stem = config["num_hidden_layers"] - 1, f"model.layers.{config['num_hidden_layers']}."
    own = {name.removeprefix(stem): shape for name, (_, shape) in tensors.items() if name.startswith(stem)}
    mtp_only = {
        "embed_tokens.weight": [vocabulary, hidden],
        "enorm.weight": [hidden],
        "hnorm.weight": [hidden],
        "eh_proj.weight": [hidden, 2 * hidden],
        "shared_head.norm.weight": [hidden],
        "shared_head.head.weight": [vocabulary, hidden],
    }
    ordinary = {
        name.removeprefix(f"model.layers.{last}."): shape
        for name, (_, shape) in tensors.items()
        if name.startswith(f"model.layers.{last}.")
    }
    assert own == ordinary | mtp_only


def test_special_tokens_lie_as_in_v3(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    size = config["vocab_size"]
    assert tokenizer.get_vocab_size() == size <= 8192
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.token_to_id(token) for token in LAST_TOKENS] == list(range(size - len(LAST_TOKENS), size))
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)


def test_skipping_special_tokens_keeps_roles_and_reasoning(tokenizer: Tokenizer) -> None:
    text = f"{USER}a{ASSISTANT}<think>b</think>c{EOS}"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix(EOS)


def test_the_configured_tokenizer_adds_one_bos() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer("hello world").input_ids.count(0) == 1
    assert tokenizer.decode(tokenizer("hello  world").input_ids[1:]) == "hello  world"


@given(st.text(max_size=200))
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(st.integers(1, 6), st.sampled_from(["return x", "if x:", "self.value = 1"]))
def test_indentation_is_cut_where_a_prompt_may_stop(tokenizer: Tokenizer, depth: int, statement: str) -> None:
    head = "def f(x):"
    whole = tokenizer.encode(f"{head}\n{'    ' * depth}{statement}", add_special_tokens=False).ids
    for stop in (head, f"{head}\n", f"{head}\n{'    ' * depth}"):
        ids = tokenizer.encode(stop, add_special_tokens=False).ids
        assert whole[: len(ids)] == ids


@pytest.mark.parametrize(
    ("messages", "prompted", "expected"),
    [
        ([("user", "a")], True, f"{BOS}{USER}a{ASSISTANT}"),
        ([("user", "a")], False, f"{BOS}{USER}a"),
        ([("system", "s"), ("user", "a")], True, f"{BOS}s{USER}a{ASSISTANT}"),
        ([("system", "s"), ("system", "t"), ("user", "a")], True, f"{BOS}s\n\nt{USER}a{ASSISTANT}"),
        (
            [("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c")],
            True,
            f"{BOS}{USER}a{ASSISTANT}b{EOS}{USER}c{ASSISTANT}",
        ),
    ],
    ids=["prompted", "unprompted", "system", "two systems", "history loses its reasoning"],
)
def test_chat_template_renders_as_v3(messages: list[tuple[str, str]], prompted: bool, expected: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    chat = [{"role": role, "content": content} for role, content in messages]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=prompted, tokenize=False) == expected


def test_chat_template_names_an_unknown_role() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    with pytest.raises(jinja2.exceptions.TemplateError, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_transformers_loads_it_whole(
    config: dict[str, Any], loaded: tuple[DeepseekV3ForCausalLM, dict[str, Any]]
) -> None:
    account = loaded[1]
    assert not account["missing_keys"]
    assert not account["mismatched_keys"]
    mtp = f"model.layers.{config['num_hidden_layers']}."
    assert all(name.startswith(mtp) for name in account["unexpected_keys"])


def test_held_out_source_is_predicted(
    loaded: tuple[DeepseekV3ForCausalLM, dict[str, Any]], tokenizer: Tokenizer
) -> None:
    # textwrap is in the test split: the model never saw it.
    text = inspect.getsource(textwrap)[:3000]
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.inference_mode():
        logits = loaded[0](ids[:, :-1]).logits[0]
    perplexity = F.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert perplexity < 14


@pytest.mark.parametrize("prompt", ["def fibonacci(n):", "def fibonacci(n):\n"], ids=["colon", "line end"])
def test_a_function_header_is_followed_by_its_indented_body(complete: Callable[[str, int], str], prompt: str) -> None:
    written = (prompt + complete(prompt, 24)).split("\n", 1)[1]
    assert written.lstrip("\n").startswith("    ")
    assert written.strip()


def test_a_statement_fits_its_class(complete: Callable[[str, int], str]) -> None:
    prompt = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    first_line = complete(prompt, 10).split("\n")[0]
    assert first_line == "        self.items.append(item)"
    ast.parse(prompt + first_line)
