"""Tensors of every model of a service, as data; model_repository/ and docs/interface.md are made from it.

The first group is that of Triton's vLLM backend (github.com/triton-inference-server/vllm_backend), with the same
names, types and meaning, so that its clients work unchanged. A changed config restarts every version, so the list
is complete from the first day: what comes later travels in `extensions` and `details`. No output has an input's name,
since an ensemble keeps both in one table.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model.

    Attributes:
        name: as in config.pbtxt.
        datatype: of the v2 protocol, such as BYTES or INT64.
        dims: shape without a batch dimension; -1 is any.
        meaning: one sentence for docs/interface.md.
        optional: whether a request may leave it out (inputs only).
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    meaning: str
    optional: bool = True


def _flag(name: str, meaning: str) -> TensorSpec:
    return TensorSpec(name, "BOOL", (1,), meaning)


def _text(name: str, meaning: str, size: int = 1) -> TensorSpec:
    return TensorSpec(name, "BYTES", (size,), meaning)


VLLM_INPUTS = (
    _text("text_input", "The prompt. Exactly one of text_input, messages and input_ids is given."),
    _text("image", "Refused with UNSUPPORTED, since DeepSeek's language models read text; leave it out.", -1),
    _flag("stream", "Send tokens as they come; without it one response holds the whole text."),
    _text("sampling_parameters", "JSON object with the names of vLLM's SamplingParams."),
    _flag(
        "exclude_input_in_output",
        "Leave the prompt out. Without stream text_input is repeated by default; with stream, false is refused.",
    ),
    _flag("return_finish_reason", "Send finish_reason."),
    _flag("return_cumulative_logprob", "Send cumulative_logprob."),
    _flag("return_logprobs", "Send logprobs; their number is the sampling parameter logprobs."),
    _flag("return_num_input_tokens", "Send num_input_tokens."),
    _flag("return_num_output_tokens", "Send num_output_tokens."),
    _text("embedding_request", "Refused with UNSUPPORTED, since these models generate text; leave it out."),
)

ADDED_INPUTS = (
    _text("messages", "A chat as a JSON list of {role, content}; rendered by the checkpoint's own template."),
    TensorSpec("input_ids", "INT64", (-1,), "The prompt as token ids, taken as they are."),
    TensorSpec("output_ids", "INT64", (-1,), "Tokens already generated elsewhere: generation goes on after them."),
    _text("extensions", "JSON object; its keys are listed below."),
)

VLLM_OUTPUTS = (
    _text("text_output", "New text, one entry a choice; without stream the whole text.", -1),
    _text("finish_reason", "One a choice: None (still running), stop, length or abort.", -1),
    TensorSpec("cumulative_logprob", "FP32", (-1,), "Sum of the chosen tokens' log-probabilities, one a choice."),
    _text("logprobs", "One JSON list a choice, one object a token: {id: {logprob, rank, decoded_token}}; or null.", -1),
    TensorSpec("num_input_tokens", "UINT32", (1,), "Tokens of the prompt."),
    TensorSpec("num_output_tokens", "UINT32", (-1,), "New tokens in this response, one a choice."),
)

ADDED_OUTPUTS = (
    TensorSpec("token_ids", "INT64", (-1,), "New tokens; with several choices one after the other, see details."),
    _text("status", 'JSON {code, message, retry_after}: {"code": "OK"} or why the request failed.'),
    TensorSpec("served_version", "INT64", (1,), "The version that made this response."),
    _text("route_reason", "Why it was that version; in the first and last response of each version."),
    _text("cancel_token", "Send it back in extensions.cancel to end this generation; beside route_reason."),
    _text("details", "JSON object; its keys are listed below."),
)

GENERATE_INPUTS = VLLM_INPUTS + ADDED_INPUTS
GENERATE_OUTPUTS = VLLM_OUTPUTS + ADDED_OUTPUTS

# Between admission and router: the request as admission read it, JSON of piccard_contract.request.GenerateRequest.
ADMITTED = _text("admitted", "The request, read, validated and completed; JSON.")

INPUT_SPECS = {spec.name: spec for spec in GENERATE_INPUTS}
OUTPUT_SPECS = {spec.name: spec for spec in GENERATE_OUTPUTS}

# v2 protocol name -> (name in config.pbtxt, numpy dtype name).
DATATYPES = {
    "BOOL": ("TYPE_BOOL", "bool"),
    "BYTES": ("TYPE_STRING", "object"),
    "FP32": ("TYPE_FP32", "float32"),
    "INT64": ("TYPE_INT64", "int64"),
    "UINT32": ("TYPE_UINT32", "uint32"),
}
