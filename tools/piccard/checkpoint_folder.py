"""Whether a folder looks like a Hugging Face checkpoint; looked at before anything else of a publication."""

import json
from pathlib import Path
from typing import Any

from piccard_contract.home import Service

from piccard.arguments import shown
from piccard.containment import check_checkpoint_files
from piccard.errors import OperationError

# Bytes of a checkpoint's JSON files; the largest index of a public checkpoint has some ten.
LARGEST_JSON = 256 * 2**20


def check_checkpoint(folder: Path) -> None:
    """Look for config.json, tokenizer.json and every shard of the weights, and for what leads out of the folder.

    Raises:
        OperationError: what is missing or wrong, and what a checkpoint needs.
    """
    if not folder.is_dir():
        raise OperationError(f"{folder} is no folder; name the folder of a Hugging Face checkpoint")
    check_checkpoint_files(folder)
    config = _json(folder / "config.json")
    if not isinstance(config, dict) or not config.get("architectures"):
        raise OperationError(f"{folder / 'config.json'} names no architectures; is it a model's configuration?")
    if not (folder / "tokenizer.json").is_file():
        raise OperationError(f"{folder / 'tokenizer.json'} is missing; save the tokenizer in the fast format")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = _json(index)
        shards = _shards(content, index)
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing or not shards:
            raise OperationError(
                f"{folder} lacks {missing[0] if missing else 'a weight_map in its index'}; download it again"
            )
    elif not any(folder.glob("*.safetensors")):
        raise OperationError(f"{folder} has no *.safetensors; convert the checkpoint to safetensors")


def _shards(content: Any, index: Path) -> set[str]:
    """The files that an index of weights names, each by its bare name."""
    names = content.get("weight_map") if isinstance(content, dict) else None
    shards = set(map(str, names.values())) if isinstance(names, dict) else set()
    for name in sorted(shards):
        if not name.isprintable() or name in ("", ".", "..") or "/" in name:
            raise OperationError(f"{index} names {shown(name)}, which is no file beside it; download it again")
    return shards


def recorded_path(folder: Path, service: Service) -> str:
    """How version.yaml names a checkpoint: relative to the home within it, so that a home can move; else absolute.

    Raises:
        OperationError: the path has characters that do not belong in one, or is among the files of a server.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in str(folder)):
        raise OperationError("the checkpoint's path has control characters; rename the folder")
    absolute = folder.absolute()
    resolved, home = absolute.resolve(), service.home.resolve()
    for kept in (service.repository, service.staging.parent, home / "state", home / "server"):
        if resolved.is_relative_to(kept.resolve()):
            raise OperationError(f"{folder} is in {kept}, which a server manages; keep checkpoints elsewhere")
    return str(resolved.relative_to(home)) if resolved.is_relative_to(home) else str(absolute)


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise OperationError(f"{path} has more than {LARGEST_JSON >> 20} MiB; is it a checkpoint's?")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise OperationError(f"{path} is missing; name the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise OperationError(f"{path} cannot be read: {error}") from error
