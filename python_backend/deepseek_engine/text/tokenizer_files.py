"""The small files beside tokenizer.json: special tokens, bos and eos ids, chat templates.

Formats are those that Hugging Face writes: tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json, chat_template.jinja and additional_chat_templates/NAME.jinja.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_engine.text.errors import TokenizerError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files say, before it is held against the vocabulary.

    Attributes:
        special_tokens: text of bos_token, eos_token, ... where the checkpoint has one.
        extra_special_tokens: further tokens that `skip_special_tokens` hides.
        add_bos_token: what tokenizer_config.json says, or None where it is silent.
        tokenizer_class: the transformers class the files were made for, "" where none is named.
        bos_token_id: from generation_config.json or config.json; None where tokenizer_config.json decides.
        eos_token_ids: from generation_config.json, or else from config.json.
        chat_templates: Jinja sources by name; the unnamed one is "default".
    """

    special_tokens: dict[str, str]
    extra_special_tokens: tuple[str, ...]
    add_bos_token: bool | None
    tokenizer_class: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read what stands beside tokenizer.json; every file may be absent.

    Raises:
        TokenizerError: a file is not a JSON object in UTF-8, or a key has a type that no release of HF writes.
    """
    config = _read_object(folder / TOKENIZER_CONFIG)
    tokens = {**_read_object(folder / SPECIAL_TOKENS_MAP), **config}
    generation = _read_object(folder / "generation_config.json")
    model = _read_object(folder / "config.json")
    bos_ids = () if "bos_token" in tokens else _first_ids("bos_token_id", folder, generation, model)
    return TokenizerFiles(
        special_tokens=_special_tokens(tokens, folder),
        extra_special_tokens=_extra_special_tokens(tokens, folder),
        add_bos_token=_flag(config, "add_bos_token", folder),
        tokenizer_class=str(config.get("tokenizer_class") or ""),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=_first_ids("eos_token_id", folder, generation, model),
        chat_templates=_chat_templates(config.get("chat_template"), folder),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON ({error}); copy it from the checkpoint again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds {type(value).__name__}, not a JSON object; copy it again")
    return value


def _token_text(value: Any, name: str, folder: Path) -> str:
    """The text of a token: a string, or an AddedToken written as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{folder / TOKENIZER_CONFIG}: {name} is {value!r}; it has to be a token's text")
    return text


def _special_tokens(tokens: dict[str, Any], folder: Path) -> dict[str, str]:
    present = {name: tokens[name] for name in SPECIAL_TOKEN_NAMES if tokens.get(name)}
    return {name: _token_text(value, name, folder) for name, value in present.items()}


def _extra_special_tokens(tokens: dict[str, Any], folder: Path) -> tuple[str, ...]:
    texts: list[str] = []
    # transformers 5 renamed the key; some checkpoints name each extra token in an object.
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = tokens.get(key) or []
        values = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(values, list):
            raise TokenizerError(f"{folder / TOKENIZER_CONFIG}: {key} has to be a list of tokens")
        texts += [_token_text(one, key, folder) for one in values]
    return tuple(texts)


def _flag(config: dict[str, Any], name: str, folder: Path) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"{folder / TOKENIZER_CONFIG}: {name} is {value!r}; it has to be true or false")
    return value


def _first_ids(name: str, folder: Path, *sources: dict[str, Any]) -> tuple[int, ...]:
    """The ids under `name` in the first source that has them; an int counts as a list of one."""
    value = next((source[name] for source in sources if source.get(name) is not None), ())
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise TokenizerError(f"{folder}: {name} is {value!r}; config.json or generation_config.json need token ids")
    return tuple(ids)


def _chat_templates(value: Any, folder: Path) -> dict[str, str]:
    """Templates by name. A chat_template.jinja beats the default of tokenizer_config.json, as in transformers."""
    templates = _configured_templates(value, folder)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    single = folder / "chat_template.jinja"
    if single.exists():
        templates["default"] = _read_template(single)
    return templates


def _configured_templates(value: Any, folder: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list) or not all(_is_named_template(one) for one in value):
        raise TokenizerError(
            f"{folder / TOKENIZER_CONFIG}: chat_template has to be a template or a list of objects, "
            "each with name and template"
        )
    return {one["name"]: one["template"] for one in value}


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as UTF-8 text ({error}); copy it again") from error
