"""Between text and token ids: tokenizer, chat template, incremental detokeniser, stop strings and reasoning parser."""

from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .errors import TokenizerError
from .output_text import OutputText
from .reasoning import ReasoningDelta, ReasoningParser
from .stop_strings import StopStrings
from .tokenizer import Tokenizer

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
