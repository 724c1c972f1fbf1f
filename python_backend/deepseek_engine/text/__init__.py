"""Between text and token ids: tokenizer, chat template, incremental detokeniser, stop strings and reasoning parser."""

from deepseek_engine.text.chat_template import ChatTemplate
from deepseek_engine.text.detokenizer import Detokenizer
from deepseek_engine.text.errors import TokenizerError
from deepseek_engine.text.output_text import OutputText
from deepseek_engine.text.reasoning import ReasoningDelta, ReasoningParser
from deepseek_engine.text.stop_strings import StopStrings
from deepseek_engine.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "OutputText",
    "ReasoningDelta",
    "ReasoningParser",
    "StopStrings",
    "Tokenizer",
    "TokenizerError",
]
