"""The registry's rows, and what is generated from them."""

import re
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
import torch
from cuda_cases import SMALL_CASES, CudaCase, Numbers
from deepseek_engine.kernels.variants import ceil_div, evaluate, next_power_of_2
from deepseek_ops.build import COMPILERS, SOURCES, find_compiler
from deepseek_ops.documentation import documentation
from deepseek_ops.formula import names_in, to_cpp
from deepseek_ops.header import operators_header
from deepseek_ops.operators import BY_NAME, OPERATORS, operators_on
from deepseek_ops.registry import CPU, CUDA, Attribute, Input, Operator, Output, ShapeError
from deepseek_ops.schemas import register_schemas
from hypothesis import given
from hypothesis import strategies as st
from one_node import one_node_model
from operator_cases import make_case

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _schemas() -> None:
    register_schemas()


def test_the_page_is_generated_from_the_registry() -> None:
    found = (ROOT / "docs" / "custom_ops.md").read_text(encoding="utf-8")
    assert found == documentation(), "run: .venv/bin/python -m deepseek_ops.documentation docs/custom_ops.md"


def test_the_page_explains_every_letter_of_a_type() -> None:
    letters = {name for operator in OPERATORS for name in operator.types}
    explained = re.search(r"a letter before it \(([^)]*)\)", documentation())
    assert explained
    assert set(explained[1].split(", ")) == letters


def test_every_row_is_whole() -> None:
    for operator in OPERATORS:
        assert operator.doc
        assert operator.tolerance
        assert all(parameter.doc for parameter in operator.parameters)
        assert len({parameter.name for parameter in operator.inputs}) == len(operator.inputs)
        for constraint, kind in operator.refused_types:
            assert kind in operator.types[constraint]


def test_the_header_holds_every_row() -> None:
    for provider in (CPU, CUDA):
        _check_header(operators_header(provider), operators_on(provider))


def _check_header(header: str, operators: tuple[Operator, ...]) -> None:
    for operator in operators:
        assert f'"{operator.name}"' in header
        for attribute in operator.attributes:
            assert f'{{"{attribute.name}",' in header
        for requirement in operator.requirements:
            assert f'"{requirement}"' in header


TOO_LARGE = {
    "kMaxNames": {"attributes": tuple(Attribute(f"a{i}", "int", "d", 1) for i in range(24))},
    "kMaxInputs": {"inputs": tuple(Input(f"i{i}", "float", ("T",), "d") for i in range(17))},
    "kMaxOutputs": {"outputs": tuple(Output(f"o{i}", "float", ("T",), "d") for i in range(5))},
    "kMaxReals": {"attributes": tuple(Attribute(f"r{i}", "float", "d", 1.0) for i in range(5))},
    "kMaxRank": {"inputs": (Input("i", "float", ("T",) * 5, "d"),)},
}


@pytest.mark.parametrize("bound", [None, *TOO_LARGE])
def test_a_row_beyond_the_librarys_arrays_does_not_compile(bound: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    parts = {"inputs": (Input("i", "float", ("T",), "d"),), "outputs": (Output("o", "float", ("T",), "d"),)}
    operator = Operator("X", "x", "y", "z", **{**parts, **TOO_LARGE.get(bound or "", {})})  # type: ignore[arg-type]
    monkeypatch.setattr("deepseek_ops.header.operators_on", lambda provider: (operator,))
    command = [find_compiler(), "-std=c++17", "-fsyntax-only", f"-I{SOURCES / 'shared'}", "-x", "c++", "-"]
    done = subprocess.run(command, input=operators_header(), capture_output=True, text=True)
    assert (done.returncode == 0) == (bound is None), done.stderr
    if bound:
        assert f"raise {bound} in spec.h" in done.stderr
        assert done.stderr.count("static assertion failed") == 1


def test_a_size_that_no_input_gives_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes that no input gives"):
        Operator("X", "x", "y", "z", (Input("a", "float", ("T",), "d"),), (Output("b", "float", ("N",), "d"),))


def test_shapes_bind_names_in_any_order() -> None:
    operator = BY_NAME["DeepSeekMLAPagedAttention"]
    case = make_case(operator.name, 3)
    shapes = [list(case.inputs[each.name].shape) if each.name in case.inputs else None for each in operator.inputs]
    attributes = {**case.attributes, "interleaved": 1}
    values = operator.bind(shapes, attributes)
    assert values["C"] == case.inputs["kv_b"].shape[1]
    shapes[2][2] += 1
    with pytest.raises(ShapeError, match=r"cache has \d+ where C \+ qk_rope_head_dim"):
        operator.bind(shapes, attributes)
    shapes[2][2] = None
    assert operator.bind(shapes, attributes) == values


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 50))
def test_formulas_are_the_same_in_cpp(a: int, b: int, c: int) -> None:
    for formula in ("a * (b + c)", "ceil_div(a, b) + 1", "a // b * c", "min(a, max(b, c))", "next_power_of_2(a)"):
        names = {"a": "v[0]", "b": "v[1]", "c": "v[2]"}
        assert names_in(formula) <= set(names)
        # Python reads it too, once its division is Python's.
        text = to_cpp(formula, names).replace("/", "//").replace("INT64_C", "")
        functions = {"ceil_div": ceil_div, "min": min, "max": max, "next_power_of_2": next_power_of_2}
        assert eval(text, functions, {"v": [a, b, c]}) == evaluate(formula, {"a": a, "b": b, "c": c})


@pytest.mark.parametrize("operator", operators_on(CPU), ids=[each.name for each in operators_on(CPU)])
def test_onnx_checks_and_infers(operator: Operator) -> None:
    for seed in range(6):
        case = make_case(operator.name, seed)
        model = one_node_model(operator, case.inputs, case.attributes, set(), "static", case.outputs, {})
        onnx.checker.check_model(model, full_check=True)
        found = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        for output in found.graph.output:
            sizes = [size.dim_value for size in output.type.tensor_type.shape.dim]
            assert sizes == list(case.expected[output.name].shape)


def test_onnx_refuses_what_the_row_does_not_take() -> None:
    operator = BY_NAME["DeepSeekMatMul"]
    inputs = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 7)}
    wrong_shape = one_node_model(operator, inputs, {}, set(), "static", ["y"], {})
    with pytest.raises(Exception, match="weight has 7 where K = 8"):
        onnx.checker.check_model(wrong_shape, full_check=True)
    wrong_type = one_node_model(operator, {**inputs, "weight": torch.zeros(4, 8).int()}, {}, set(), "static", ["y"], {})
    with pytest.raises(Exception, match=r"weight|int32"):
        onnx.checker.check_model(wrong_type, full_check=True)
    unknown = one_node_model(operator, {**inputs, "weight": torch.zeros(4, 8)}, {"axis": 1}, set(), "static", ["y"], {})
    with pytest.raises(onnx.checker.ValidationError, match="axis"):
        onnx.checker.check_model(unknown, full_check=True)


CUDA_CASES = [make(Numbers(torch.float16, 0)) for make in SMALL_CASES]


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
def test_onnx_checks_and_infers_graphs_for_cuda(case: CudaCase) -> None:
    operator = BY_NAME[case.operator].on(CUDA)
    model = one_node_model(operator, case.inputs, case.attributes, set(), "static", list(case.expected), {})
    onnx.checker.check_model(model, full_check=True)
    for output in onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output:
        assert [size.dim_value for size in output.type.tensor_type.shape.dim] == list(case.expected[output.name].shape)


def test_a_row_on_cuda_has_its_types_there() -> None:
    operator = BY_NAME["DeepSeekMLAPagedAttention"].on(CUDA)
    kinds = {each.name: operator.accepted(each) for each in operator.parameters}
    halves = ("float16", "bfloat16")
    assert {kinds[name] for name in ("q", "entries", "cache", "kv_b", "latent_norm", "y", "cache_out")} == {halves}
    assert {kinds[name] for name in ("block_tables", "query_starts", "table_rows", "host_batch")} == {("int32",)}
    assert operator.types == {"T": halves}
    assert [each.name for each in operator.inputs if each.optional] == ["plan"]
    assert BY_NAME["DeepSeekMLAPagedAttention"].accepted_anywhere(operator.inputs[4]) == ("int64", "int32")
