"""Requests of every kind, each of which tells by its text what it has to be, whoever serves it."""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from callers import Call, Told

_WORD = re.compile(r" ([^ @]+)@([0-9]+)")

# Why an answer may come from where it does, by X-Canary, as long as no version failed.
_REASONS = {"false": ("header",), "true": ("header", "canary_unavailable")}

# The longest answer in tokens; short ones end before a version is gone, long ones do not.
LONGEST = 24


@dataclass(slots=True)
class ScriptedRequest:
    """A request of its own words, which a scripted version repeats, each tagged with the version's number.

    Args:
        number: no other request of the run has it.

    Attributes:
        tokens: of the whole answer.
    """

    number: int
    tokens: int
    call: Call = field(init=False)
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.002

    def __post_init__(self) -> None:
        inputs: dict[str, Any] = {
            "text_input": " ".join(self.words),
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "sampling_parameters": {"max_tokens": 1000},
            "extensions": {"script": {"tokens": self.tokens, "delay_s": self.delay, "tag": True}},
        }
        self.call = Call(inputs, dict(self.headers))

    @property
    def words(self) -> list[str]:
        return ["r", *str(self.number)]

    def faults(self, told: Told) -> list[str]:
        """What is wrong with the answer; empty where it is whole and right."""
        if told.error is not None:
            return [f"error: {told.error}"]
        if not told.responses:
            return ["no response"]
        found = []
        if told.finish_reason != "stop":
            found.append(f"finish reason {told.finish_reason}")
        spoken = _WORD.findall(told.text)
        expected = [self.words[index % len(self.words)] for index in range(self.tokens)]
        if [word for word, _ in spoken] != expected or "".join(f" {word}@{tag}" for word, tag in spoken) != told.text:
            found.append(f"text {told.text!r}, expected the words {' '.join(expected)}")
        if not spoken:
            return [*found, "nobody tagged it"]
        return found + self._wrong_versions(told, list(dict.fromkeys(int(tag) for _, tag in spoken)))

    def _wrong_versions(self, told: Told, speakers: list[int]) -> list[str]:
        """One version has to have said it all, or the answer has to name those that failed before the last.

        A stream names with every piece who said it, a single answer only who ended it.
        """
        route = told.details.get("route")
        failed = [attempt["version"] for attempt in route["attempts"]] if route else []
        found = []
        named = list(dict.fromkeys(r["served_version"][0] for r in told.responses if r["text_output"][0]))
        # One that died after its last word left nothing but the end to be told by the next.
        last = speakers[-1:] if speakers[-1] not in failed else told.versions[-1:]
        if named != (speakers if len(told.responses) > 1 else last) or told.versions[-1:] != last:
            found.append(f"served_version {told.versions}, but {speakers} said it")
        if len(speakers) > 1 and not set(speakers[:-1]) <= set(failed):
            found.append(f"versions {speakers} said it, but details.route is {route}")
        reason = told.responses[-1]["route_reason"][0]
        if route is None and reason not in _REASONS.get(self.headers.get("x-canary", ""), (reason,)):
            found.append(f"X-Canary was not followed: {reason}")
        return found


class RequestMix:
    """Makes requests: short and longer ones, with X-Canary or without, some with a session."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, number: int, *, delay: float) -> ScriptedRequest:
        draw = self._random.random()
        headers: dict[str, str] = {}
        if draw < 0.2:
            headers["x-canary"] = "true"
        elif draw < 0.4:
            headers["x-canary"] = "false"
        elif draw < 0.6:
            headers["x-session-id"] = f"s{self._random.randrange(50)}"
        return ScriptedRequest(number, self._random.randint(1, LONGEST), headers=headers, delay=delay)
