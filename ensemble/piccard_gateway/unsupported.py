"""Parameters of OpenAI's API, and of servers like it, that no version serves."""

from typing import Any

from piccard_contract.errors import ErrorCode
from piccard_contract.sampling import SamplingParams
from piccard_contract.unserved import UNSERVED
from piccard_contract.validation import closest

from piccard_gateway.errors import refused

_NO_GRAMMAR = "the text cannot be held to a grammar, schema or choice; ask for its form in the prompt"
_NO_TOOLS = "no tools are called; describe them in the prompt"
_NOTHING_KEPT = "nothing is kept of a request"

UNSUPPORTED: dict[str, str] = {
    **UNSERVED,
    "audio": "the models write text only",
    "detokenize": "answers are text; see the ensemble's output token_ids",
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "guided_choice": _NO_GRAMMAR,
    "guided_grammar": _NO_GRAMMAR,
    "guided_json": _NO_GRAMMAR,
    "guided_regex": _NO_GRAMMAR,
    "metadata": _NOTHING_KEPT,
    "modalities": "the models write text only",
    "parallel_tool_calls": _NO_TOOLS,
    "prediction": "there is no speculative decoding from a prediction",
    "prompt_logprobs": "echo with logprobs tells them in /v1/completions",
    "reasoning_effort": "how long a model reasons is its own; max_tokens bounds it together with the answer",
    "response_format": _NO_GRAMMAR,
    "service_tier": "there is one tier; see the header X-Priority",
    "store": _NOTHING_KEPT,
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "verbosity": "how long an answer is, is the model's own; ask for its length in the prompt",
    "web_search_options": "nothing is searched",
}

# Values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "detokenize": (True,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def check_names(rest: dict[str, Any], known: set[str]) -> None:
    """Refuse what is asked for beside the known names and sampling parameters.

    Args:
        rest: name -> value of the request's other keys.
        known: names that the endpoint has itself.

    Raises:
        ApiError: 422 for what is not served, 400 for a name that nobody knows.
    """
    for name, value in rest.items():
        if name in UNSUPPORTED:
            if value is not None and value not in _NEUTRAL.get(name, ()):
                raise refused(ErrorCode.UNSUPPORTED, f"{name} is not served: {UNSUPPORTED[name]}; leave it out", name)
        elif name not in SamplingParams.model_fields:
            hint = closest(name[:64], {*known, *SamplingParams.model_fields})
            raise refused(
                ErrorCode.UNKNOWN_PARAMETER, f"{name[:64]} is not a parameter of this endpoint.{hint}", name[:64]
            )
