"""What an operator does not take: told when the session is made where it is known then, else by the run."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_ops.operators import operators_on
from deepseek_ops.registry import CPU, ELEMENT_TYPES, Input, Operator
from one_node import DTYPES, OneNode
from operator_cases import Case, make_case
from torch import Tensor

ATTENTION = "DeepSeekMLAPagedAttention"
NAMES = [operator.name for operator in operators_on(CPU)]


def made(library: Path, case: Case, **options: object) -> OneNode:
    return OneNode(library, case.name, case.inputs, case.attributes, outputs=case.outputs, **options)  # type: ignore[arg-type]


def taken_inputs(operator: Operator) -> list[Input]:
    """Those that the CPU takes."""
    return [each for each in operator.inputs if CPU not in each.refused]


REFUSED = [(operator, each) for operator in operators_on(CPU) for each in operator.inputs if CPU in each.refused]


@pytest.mark.parametrize(("operator", "parameter"), REFUSED, ids=[f"{o.name}-{p.name}" for o, p in REFUSED])
def test_an_input_of_another_provider_fails_the_session(library: Path, operator: Operator, parameter: Input) -> None:
    case = make_case(operator.name, 0)
    shape = [1] * len(parameter.shape)
    dtype = DTYPES[operator.accepted(parameter)[0]]
    case.inputs[parameter.name] = torch.zeros(shape, dtype=dtype)
    with pytest.raises(Exception, match=f"input {parameter.name} is not taken: {re.escape(parameter.refused[CPU])}"):
        made(library, case)


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_a_wrong_type_fails_the_session(library: Path, operator: Operator) -> None:
    for parameter in taken_inputs(operator):
        case = next(case for seed in range(50) if parameter.name in (case := make_case(operator.name, seed)).inputs)
        taken = operator.accepted(parameter)
        wrong = next(name for name in ("double", "int8") if name not in taken)
        case.inputs[parameter.name] = case.inputs[parameter.name].to(torch.float32).to(DTYPES[wrong])
        # A kernel that refuses an anchor makes its outputs float.
        decided = [output.name for output in operator.outputs if output.type == parameter.type]
        types = dict.fromkeys(decided if parameter in operator.anchors() else [], 1)
        head = f"com.deepseek.{operator.name}, node 'the_node': input {parameter.name} is of type {wrong}"
        listed = ", ".join(sorted(taken, key=ELEMENT_TYPES.__getitem__))
        with pytest.raises(Exception, match=f"{head}; constraint {parameter.type} takes {listed}"):
            made(library, case, output_types=types, shapes="static")


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_a_wrong_rank_or_size_fails_the_session_or_the_run(library: Path, operator: Operator) -> None:
    for parameter in taken_inputs(operator):
        case = next(case for seed in range(50) if parameter.name in (case := make_case(operator.name, seed)).inputs)
        tensor = case.inputs[parameter.name]
        for changed in (tensor.unsqueeze(0), tensor[:0]):
            inputs = {**case.inputs, parameter.name: changed.contiguous()}
            outputs = {name: list(value.shape) for name, value in case.expected.items()}
            head = re.escape(f"com.deepseek.{operator.name}, node 'the_node': input ")
            with pytest.raises(Exception, match=head):
                OneNode(library, case.name, inputs, case.attributes, shapes="static", outputs=case.outputs)
            node = OneNode(library, case.name, inputs, case.attributes, shapes="unknown", outputs=case.outputs)
            with pytest.raises(Exception, match=head):
                node.run(inputs, outputs)


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_more_dimensions_than_any_operator_takes_fail_the_session_or_the_run(library: Path, operator: Operator) -> None:
    for parameter, rank in itertools.product(taken_inputs(operator), (5, 8)):
        case = next(case for seed in range(50) if parameter.name in (case := make_case(operator.name, seed)).inputs)
        tensor = case.inputs[parameter.name]
        inputs = {**case.inputs, parameter.name: tensor[(None,) * (rank - tensor.dim())]}
        sentence = (
            f"com.deepseek.{operator.name}, node 'the_node': input {parameter.name} has {rank} dimensions;"
            f" it has to have {len(parameter.shape)}$"
        )
        for shapes, constant in (("static", []), ("ranks", []), ("static", [parameter.name])):
            with pytest.raises(Exception, match=sentence):
                OneNode(
                    library,
                    case.name,
                    inputs,
                    case.attributes,
                    constant=constant,
                    shapes=shapes,
                    outputs=case.outputs,
                )
        node = OneNode(library, case.name, inputs, case.attributes, shapes="unknown", outputs=case.outputs)
        with pytest.raises(Exception, match=sentence):
            node.run(inputs, {name: list(value.shape) for name, value in case.expected.items()})


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_sizes_that_a_run_refuses_fail_the_session_where_it_knows_them(library: Path, operator: Operator) -> None:
    for parameter in taken_inputs(operator):
        case = next(case for seed in range(50) if parameter.name in (case := make_case(operator.name, seed)).inputs)
        tensor = case.inputs[parameter.name]
        outputs = {name: list(value.shape) for name, value in case.expected.items() if "cache" not in name}
        for axis in range(tensor.dim()):
            larger = torch.cat((tensor.view(torch.uint8), tensor.narrow(axis, 0, 1).view(torch.uint8)), axis)
            inputs = {**case.inputs, parameter.name: larger.view(tensor.dtype)}
            node = OneNode(library, case.name, inputs, case.attributes, shapes="unknown", outputs=case.outputs)
            head = f"com.deepseek.{operator.name}, node 'the_node': "
            try:
                node.run(inputs, outputs)
            except Exception as error:
                # The runtime's own, which tell where they stand, are about the outputs that are bound.
                if head in str(error) and "onnxruntime_src" not in str(error):
                    with pytest.raises(Exception, match=head):
                        OneNode(library, case.name, inputs, case.attributes, shapes="static", outputs=case.outputs)


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_a_size_with_which_formulas_would_overflow_fails_the_session(
    library: Path, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parameter in taken_inputs(operator):
        case = next(case for seed in range(50) if parameter.name in (case := make_case(operator.name, seed)).inputs)
        for axis, size in itertools.product(range(len(parameter.shape)), (2**49, 2**62, 2**63 - 1)):
            declared = {name: list(tensor.shape) for name, tensor in case.inputs.items()}
            declared[parameter.name][axis] = size
            monkeypatch.setattr("one_node._declared", lambda name, *_, declared=declared: declared[name])
            with pytest.raises(
                Exception, match=f"input {parameter.name} has shape .*{size}.*; a size has to be at most"
            ):
                made(library, case)


def test_types_of_one_constraint_are_equal(library: Path) -> None:
    inputs = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4).bfloat16()}
    with pytest.raises(Exception, match="inputs weight and bias are of types float and bfloat16; constraint W"):
        OneNode(library, "DeepSeekMatMul", inputs)


def test_packed_caches_are_refused_with_a_sentence(library: Path) -> None:
    case = make_case(ATTENTION, 0)
    case.attributes["cache_format"] = "fp8_ds_mla"
    with pytest.raises(Exception, match="packed cache, which is not built yet: use a cache of type float"):
        made(library, case)
    case = make_case(ATTENTION, 0)
    case.inputs["cache"] = case.inputs["cache"].to(torch.uint8)
    with pytest.raises(Exception, match="input cache of type uint8 is a packed cache, which is not built yet"):
        made(library, case)


def test_attributes_are_checked(library: Path) -> None:
    case = make_case(ATTENTION, 0)
    for name, value, message in (
        ("num_heads", 0, "attribute num_heads is 0; it has to be from 1"),
        ("num_heads", 1 << 40, "attribute num_heads is 1099511627776"),
        ("cache_format", "other", "attribute cache_format is other; it may be plain, fp8_ds_mla"),
    ):
        with pytest.raises(Exception, match=message):
            OneNode(library, ATTENTION, case.inputs, {**case.attributes, name: value}, outputs=case.outputs)
    odd = {**case.attributes, "qk_rope_head_dim": 5}
    with pytest.raises(Exception, match=r"qk_rope_head_dim // 2 \* 2 == qk_rope_head_dim does not hold: 4 and 5"):
        OneNode(library, ATTENTION, case.inputs, odd, outputs=case.outputs)
    del case.attributes["scale"]
    with pytest.raises(Exception, match="attribute scale is missing"):
        made(library, case)


OF_OTHER_KINDS = {
    "int": (2.0, "2", [2], [2.0], ["2"]),
    "float": (1, "1.0", [1], [1.0], ["1.0"]),
    "string": (1, 1.0, [1], [1.0], ["plain"]),
}


@pytest.mark.parametrize("operator", operators_on(CPU), ids=NAMES)
def test_an_attribute_of_another_kind_is_not_its_default(library: Path, operator: Operator) -> None:
    case = make_case(operator.name, 0)
    head = f"com.deepseek.{operator.name}, node 'the_node': attribute "
    for attribute in operator.attributes:
        sentences = [(value, "is of another type; it has to be an? ") for value in OF_OTHER_KINDS[attribute.kind]]
        if attribute.kind == "float":
            sentences += [(float(value), f"is {value}; it has to be finite") for value in ("nan", "inf", "-inf")]
        for value, sentence in sentences:
            attributes = {**case.attributes, attribute.name: value}
            with pytest.raises(Exception, match=f"{head}{attribute.name} {sentence}"):
                OneNode(library, operator.name, case.inputs, attributes, outputs=case.outputs)


def test_what_attention_prepares_by_is_given_whole(library: Path) -> None:
    case = next(case for seed in range(50) if "rotations" in (case := make_case(ATTENTION, seed)).inputs)
    for left_out in ("positions", "rotations", "latent_norm"):
        inputs = {name: tensor for name, tensor in case.inputs.items() if name != left_out}
        node = OneNode(library, ATTENTION, inputs, case.attributes, outputs=case.outputs)
        with pytest.raises(Exception, match="inputs positions, rotations and latent_norm have to be given all or none"):
            node.run(inputs)
    for position in (-1, len(case.inputs["rotations"])):
        inputs = {**case.inputs, "positions": torch.full_like(case.inputs["positions"], position)}
        with pytest.raises(Exception, match=rf"positions\[0\] is {position}; rotations has \d+ rows"):
            made(library, case).run(inputs)


def test_a_cache_that_is_copied_is_refused(library: Path) -> None:
    case = make_case(ATTENTION, 0)
    with pytest.raises(Exception, match="cache_out has to share the memory of input cache, which is written in place"):
        made(library, case).run(case.inputs, {"cache_out": list(case.inputs["cache"].shape)})


def test_caches_that_share_memory_are_refused(library: Path) -> None:
    case = make_case("DeepSeekPagedAttention", 0)
    node = made(library, case)
    keys = case.inputs["key_cache"]
    both = torch.zeros(2 * len(keys), *keys.shape[1:], dtype=keys.dtype)
    first = both[: len(keys)]
    for values in (first, both[len(keys) - 1 : -1], both[len(keys) :]):
        for pair in ((first, values), (values, first)):
            inputs = {**case.inputs, **dict(zip(("key_cache", "value_cache"), pair, strict=True))}
            if values.data_ptr() == both[len(keys) :].data_ptr():
                node.run(inputs)
                continue
            with pytest.raises(Exception, match="node 'the_node': inputs key_cache and value_cache share memory"):
                node.run(inputs)


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        case.inputs[name] = change(case.inputs[name].clone())

    return apply


def _set(*place: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return change


MALFORMED = {
    "negative block": (ATTENTION, "block_tables", _set(0, 0, value=-1), r"block_tables\[0, 0\] is -1; the cache has"),
    "block too large": (ATTENTION, "block_tables", _set(0, 0, value=10**9), r"block_tables\[0, 0\] is 1000000000"),
    "context too long": (ATTENTION, "context_lengths", _set(0, value=2**62), "block table has room for"),
    "context too short": (ATTENTION, "context_lengths", _set(0, value=0), r"context_lengths\[0\] is 0, below"),
    "rows that go back": (ATTENTION, "query_starts", _set(0, value=1), "query_starts has to begin with 0"),
    "rows beyond the end": (ATTENTION, "query_starts", _set(-1, value=10**6), "end with the number of rows"),
    "negative position": ("DeepSeekRotaryEmbedding", "positions", _set(0, value=-1), r"positions\[0\] is -1"),
    "expert too large": ("DeepSeekMoE", "experts", _set(0, 0, value=1000), r"experts\[0, 0\] is 1000; there are"),
    "packed expert too large": ("DeepSeekMoEInt4", "experts", _set(0, 0, value=9), r"experts\[0, 0\] is 9; there are"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_values_fail_the_run(library: Path, kind: str) -> None:
    name, parameter, change, message = MALFORMED[kind]
    for seed in range(3):
        case = make_case(name, seed)
        node = made(library, case)
        _changed(parameter, change)(case)
        with pytest.raises(Exception, match=f"com.deepseek.{name}, node 'the_node': .*{message}"):
            node.run(case.inputs)


def test_a_position_beyond_the_bound_fails_the_run(library: Path) -> None:
    case = make_case("DeepSeekRotaryEmbedding", 0)
    case.inputs["positions"][0] = 64
    case.attributes["max_position_embeddings"] = 64
    with pytest.raises(Exception, match="below max_position_embeddings = 64"):
        made(library, case).run(case.inputs)


@pytest.mark.parametrize("name", [ATTENTION, "DeepSeekPagedAttention"])
def test_a_length_whose_buffers_would_not_fit_fails_the_run(library: Path, name: str) -> None:
    """A table may name one block often: one that is small enough to make has room for a length of any size."""
    case = make_case(name, 0)
    caches = [key for key in case.inputs if key.endswith("cache")]
    for key in caches:
        case.inputs[key] = torch.zeros(1, 2**13, case.inputs[key].shape[2], dtype=case.inputs[key].dtype)
    places = 2**11 + 1
    case.inputs["block_tables"] = torch.zeros(len(case.inputs["context_lengths"]), places, dtype=torch.int64)
    node = made(library, case)
    for length in (2**24 + 1, places * 2**13):
        case.inputs["context_lengths"][0] = length
        shapes = {key: list(value.shape) for key, value in case.expected.items() if key == "y"}
        with pytest.raises(Exception, match=rf"context_lengths\[0\] is {length}; it has to be at most {2**24}$"):
            node.run(case.inputs, shapes)


def test_the_gate_asks_for_what_its_method_needs(library: Path) -> None:
    inputs = {"x": torch.zeros(2, 5), "weight": torch.zeros(8, 5)}
    options = {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    for method, message in (("noaux_tc", "needs the input bias"), ("greedy", "n_group has to be 1")):
        node = OneNode(library, "DeepSeekMoEGate", inputs, {**options, "topk_method": method})
        with pytest.raises(Exception, match=message):
            node.run(inputs)


SHARED = {
    "DeepSeekMoE": ("shared_gate_up", "shared_down"),
    "DeepSeekMoEInt4": ("shared_gate_up", "shared_gate_up_scales", "shared_down", "shared_down_scales"),
}


@pytest.mark.parametrize(("name", "left_out"), [(name, each) for name, parts in SHARED.items() for each in parts])
def test_a_shared_expert_is_given_whole(library: Path, name: str, left_out: str) -> None:
    case = next(case for seed in range(50) if left_out in (case := make_case(name, seed)).inputs)
    del case.inputs[left_out]
    with pytest.raises(Exception, match=r"inputs shared_gate_up.* and shared_down.* have to be given"):
        made(library, case).run(case.inputs)


def test_zeros_without_their_shared_expert_are_refused(library: Path) -> None:
    case = next(
        case for seed in range(50) if "shared_down_zeros" in (case := make_case("DeepSeekMoEInt4", seed)).inputs
    )
    for part in SHARED[case.name]:
        del case.inputs[part]
    with pytest.raises(Exception, match="are of a shared expert, which is not given"):
        made(library, case).run(case.inputs)
