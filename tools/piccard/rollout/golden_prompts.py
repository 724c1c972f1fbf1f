"""Golden prompts: texts with a continuation, whose log-probability tells whether a version has become worse.

A service has its own in `state/<service>/golden.jsonl`, one JSON object a line, each with `text` or `messages` (a chat)
and `continuation`; a home without that file goes by those that are built in.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from piccard_canary.rollout.golden import LEAST_PROMPTS
from piccard_contract.home import Service
from piccard_contract.validation import explain
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from piccard.errors import OperationError

# So that a look at both versions stays a small part of what they do.
MOST_PROMPTS = 256
MOST_CHARACTERS = 8192

# A text, or the messages of a chat.
Chat = str | list[dict[str, Any]]


class GoldenPrompt(BaseModel):
    """A prompt and what is to follow it.

    Attributes:
        text: what comes before the continuation; exactly one of text and messages is set.
        messages: a chat, to which the continuation is the assistant's answer.
        continuation: the text whose log-probability counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str | None = Field(default=None, min_length=1, max_length=MOST_CHARACTERS)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    continuation: str = Field(min_length=1, max_length=MOST_CHARACTERS)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give one of text and messages, and the continuation")
        if self.text is not None and self.text.endswith((" ", "\t")):
            # Tokens of words begin with their blank, so that this one alone would be a token as none of a whole text.
            raise ValueError("text ends in a blank; let the continuation begin with it")
        if self.messages is not None and len(json.dumps(self.messages)) > MOST_CHARACTERS:
            raise ValueError(f"messages have at most {MOST_CHARACTERS} characters; shorten them")
        return self

    @property
    def before(self) -> Chat:
        """What comes before the continuation."""
        return self.messages if self.messages is not None else self.text or ""

    @property
    def whole(self) -> Chat:
        """It and the continuation."""
        if self.messages is not None:
            return [*self.messages, {"role": "assistant", "content": self.continuation}]
        return (self.text or "") + self.continuation


def golden_prompts(service: Service) -> Sequence[GoldenPrompt]:
    """The golden prompts of a service: its own, or those that are built in.

    Raises:
        OperationError: its file cannot be read or holds what is none, with the line and what to change.
    """
    try:
        lines = service.golden_prompts.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return BUILT_IN
    except (OSError, UnicodeDecodeError) as error:
        raise OperationError(f"{service.golden_prompts} cannot be read ({error})") from error
    found = [
        _prompt(service.golden_prompts, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not LEAST_PROMPTS <= len(found) <= MOST_PROMPTS:
        raise OperationError(
            f"{service.golden_prompts} holds {len(found)} golden prompts; {LEAST_PROMPTS} to {MOST_PROMPTS} are needed"
        )
    return found


def _prompt(path: Path, number: int, line: str) -> GoldenPrompt:
    try:
        return GoldenPrompt.model_validate(json.loads(line))
    except ValidationError as error:
        raise OperationError(f"{path}, line {number}: {explain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise OperationError(f"{path}, line {number}: it is not JSON ({error})") from error


# Code, prose, mathematics and data, so that whichever of these a model is for is among them.
BUILT_IN = tuple(
    GoldenPrompt(text=text, continuation=continuation)
    for text, continuation in (
        (
            "def fibonacci(n):\n",
            "    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
        ),
        (
            "import os\n\n\ndef read_lines(path):\n",
            '    with open(path, encoding="utf-8") as file:\n        return [line.rstrip() for line in file]\n',
        ),
        (
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
            "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n",
        ),
        (
            "def mean(values):\n    if not values:\n",
            '        raise ValueError("no values")\n    return sum(values) / len(values)\n',
        ),
        (
            "for index in range(10):\n    if index % 2 == 0:\n",
            "        continue\n    print(index)\n",
        ),
        (
            "def is_prime(number):\n    if number < 2:\n        return False\n",
            "    for divisor in range(2, int(number ** 0.5) + 1):\n        if number % divisor == 0:\n"
            "            return False\n    return True\n",
        ),
        (
            "try:\n    value = int(text)\n",
            "except ValueError:\n    value = None\n",
        ),
        (
            "import json\n\nwith open(path) as file:\n",
            "    data = json.load(file)\n",
        ),
        (
            "#include <stdio.h>\n\nint main(void) {\n",
            '    printf("hello\\n");\n    return 0;\n}\n',
        ),
        (
            "SELECT name, COUNT(*) FROM orders\n",
            "WHERE price > 100\nGROUP BY name\nORDER BY name;\n",
        ),
        (
            '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41,',
            ' "city": "Manchester"}\n',
        ),
        (
            "The water at the bottom of the sea is cold, dark and under great pressure. Few animals",
            " can live there, and those that do have never seen the light of the sun.",
        ),
        (
            "To boil an egg, put it into hot water and wait for",
            " seven minutes. Then take it out and cool it in cold water.",
        ),
        (
            "Question: What is 12 times 12?\nAnswer:",
            " 12 times 12 is 144.\n",
        ),
        (
            "1, 2, 4, 8, 16,",
            " 32, 64, 128, 256, 512",
        ),
        (
            "北京是中国的首都。上海是",
            "中国最大的城市之一。",
        ),
    )
)
