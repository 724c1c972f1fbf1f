"""An engine without a model: it plays scripts, so that streams, delays, failures and deaths can be tested at will."""

from deepseek_engine.scripted.backend import ScriptedBackend, ScriptedRequest
from deepseek_engine.scripted.script import Script
from deepseek_engine.scripted.word_tokenizer import WordTokenizer

__all__ = ["Script", "ScriptedBackend", "ScriptedRequest", "WordTokenizer"]
