"""Names of vLLM's `SamplingParams` and of Triton's vLLM backend that no version serves.

They are told apart from mistyped names: UNSUPPORTED with what to do instead, and not UNKNOWN_PARAMETER. The names are
those of vLLM's sampling_params.py in 2026, and those that it had before (guided_decoding, best_of, beam search,
logits_processors, truncate_prompt_tokens).
"""

_NO_BEAMS = "there is no beam search; raise n"
_NO_GRAMMAR = "the text cannot be held to a grammar, schema or choice; ask for its form in the prompt"
_OF_VLLM = "it belongs to the inside of vLLM"
_ALL_POSITIONS = "prompt_logprobs tells the most likely tokens of every position"

# Name -> why it is refused, or what to use instead; `refusal` adds the rest of the sentence.
UNSERVED: dict[str, str] = {
    "allowed_token_ids": "tokens cannot be limited to a list; a logit_bias of 100 prefers them",
    "bad_words": "words cannot be forbidden; a logit_bias of -100 all but forbids a token",
    "best_of": "all n choices are returned; choose among them by their cumulative_logprob",
    "early_stopping": _NO_BEAMS,
    "extra_args": "no version has code that reads it",
    "flat_logprobs": "the output logprobs has one form",
    "guided_decoding": _NO_GRAMMAR,
    "length_penalty": _NO_BEAMS,
    "logits_processors": "no code can be sent; see logit_bias and the penalties",
    "logprob_token_ids": "logprobs tells the most likely tokens, and none by name",
    "lora_name": "no version has adapters",
    "output_kind": "the input stream says whether tokens come as they are made",
    "prompt_logprob_start": _ALL_POSITIONS,
    "prompt_logprob_token_ids": _ALL_POSITIONS,
    "repetition_detection": "nothing ends repetition by itself; see repetition_penalty and frequency_penalty",
    "routed_experts_prompt_start": "no version tells which experts it chose",
    "skip_clone": _OF_VLLM,
    "skip_reading_prefix_cache": "a request cannot pass the prefix cache by",
    "stream_interval": "extensions.coalesce_ms says how long a response waits for more tokens",
    "structured_outputs": _NO_GRAMMAR,
    "thinking_token_budget": "thinking is not ended early; max_tokens bounds it together with the answer",
    "trace_decode_token_ids": "tokens are not dictated; output_ids puts tokens before the new ones",
    "truncate_prompt_tokens": "prompts are not cut; cut it yourself, and a longer one than the context is refused",
    "use_beam_search": _NO_BEAMS,
}


def refusal(name: str) -> str:
    """The sentence that refuses the parameter `name`.

    Raises:
        KeyError: `name` is no such parameter.
    """
    return f"{name} is not served: {UNSERVED[name]}; leave it out"
