"""Opens a version with `runner: scripted`."""

from typing import Any, cast

from piccard_contract.version_file import VersionFile

from deepseek_engine.request import EngineRequest
from deepseek_engine.scripted.backend import ScriptedBackend, ScriptedRequest
from deepseek_engine.scripted.word_tokenizer import WordTokenizer
from deepseek_engine.text.tokenizer import Tokenizer
from deepseek_engine.version import OpenVersion

DEFAULT_CONTEXT = 32768


def open_scripted(file: VersionFile, *, number: int) -> OpenVersion:
    """The scripted version `number`; of version.yaml it reads max_model_len alone."""
    tokenizer = WordTokenizer()
    max_model_len = file.max_model_len or DEFAULT_CONTEXT
    backend = ScriptedBackend(tokenizer, version=number, max_model_len=max_model_len)
    return OpenVersion(
        file=file,
        backend=backend,
        # It has what serving asks of a tokenizer.
        tokenizer=cast(Tokenizer, tokenizer),
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        device="cpu",
        pause=backend.pause,
        play=_play,
    )


def _play(request: EngineRequest, script: dict[str, Any]) -> EngineRequest:
    return ScriptedRequest(
        id=request.id,
        prompt_ids=request.prompt_ids,
        params=request.params,
        output_ids=request.output_ids,
        priority=request.priority,
        salt=request.salt,
        script=script,
    )
