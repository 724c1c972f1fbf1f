"""Writes a trained model as a Hugging Face checkpoint with DeepSeek-V3's tensor names."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from training.model import Model

SHARD_BYTES = 8_000_000
KEPT_FP32 = "e_score_correction_bias"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def checkpoint_name(name: str, mtp_index: int) -> str:
    """Return the checkpoint's name of a training parameter."""
    if name.startswith("lm_head."):
        return name
    if name.startswith("mtp."):
        own = name.removeprefix("mtp.").replace("shared_head_norm", "shared_head.norm")
        return f"model.layers.{mtp_index}.{own}"
    return f"model.{name}"


def checkpoint_tensors(model: Model) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint on the CPU: bf16, the gates' correction biases fp32.

    The gates' last temperature is folded into their weights; embedding and head are repeated in the MTP layer.
    """
    mtp_index = model.shape.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        renamed = checkpoint_name(name, mtp_index)
        value = tensor.detach().float().cpu()
        if renamed.endswith("mlp.gate.weight"):
            value = value / float(model.temperature)
        if ".mlp.experts." in renamed:
            stem, projection = renamed.rsplit(".", 1)
            tensors.update({f"{stem}.{i}.{projection}.weight": expert for i, expert in enumerate(value)})
        else:
            tensors[renamed] = value
    tensors[f"model.layers.{mtp_index}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"model.layers.{mtp_index}.shared_head.head.weight"] = tensors["lm_head.weight"]
    return {
        name: (value.clone() if name.endswith(KEPT_FP32) else value.to(torch.bfloat16, copy=True).contiguous())
        for name, value in tensors.items()
    }


def shards_of(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Fill shards of at most ``SHARD_BYTES``, header allowance included, in layer order."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() + len(name) + 128
        if filled + size > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def write(model: Model, folder: Path) -> None:
    """Write config.json, generation_config.json, the shards and their index into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(model)
    shards = shards_of(tensors)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    generation = {"bos_token_id": 0, "do_sample": True, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95}
    for name, content in (
        ("config.json", model.shape.config()),
        ("generation_config.json", generation),
        ("model.safetensors.index.json", index),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
