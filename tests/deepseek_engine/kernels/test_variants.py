import pytest
from deepseek_engine.kernels.variants import (
    ADA,
    AMPERE,
    HOPPER,
    FormulaError,
    Kernel,
    LaunchPlan,
    Step,
    Table,
    Variant,
    ceil_div,
    evaluate,
    nearest_architecture,
    next_power_of_2,
)
from hypothesis import given
from hypothesis import strategies as st

KERNEL = Kernel("scale", "module:function", {"x": "*T", "n": "i32"}, ("BLOCK",), frozenset(("x",)))


def row(name: str, block: int, **options: object) -> Variant:
    return Variant("scale", name, {"BLOCK": block}, **options)


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_formulas_compute_as_python_does(a: int, b: int) -> None:
    values = {"a": a, "b": b}
    assert evaluate("ceil_div(a, b) * b - a", values) == ceil_div(a, b) * b - a
    assert evaluate("min(a, b) + max(a, 3) // 2", values) == min(a, b) + max(a, 3) // 2
    assert evaluate("next_power_of_2(b)", values) == next_power_of_2(b) >= b


@pytest.mark.parametrize(
    "formula", ["a ** 2", "a / b", "__import__('os')", "a if b else 0", "[a]", "1.5", "min(a, key=b)"]
)
def test_what_a_generated_launcher_could_not_translate_is_refused(formula: str) -> None:
    with pytest.raises(FormulaError, match="is none of names"):
        evaluate(formula, {"a": 1, "b": 2})


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(FormulaError, match="rows is not among"):
        evaluate("rows * 2", {"tokens": 1})


@pytest.mark.parametrize(
    ("capability", "architecture"), [(80, AMPERE), (86, AMPERE), (89, ADA), (90, HOPPER), (75, None), (100, None)]
)
def test_binaries_of_the_nearest_lower_minor_version_run(capability: int, architecture: int | None) -> None:
    assert nearest_architecture(capability) == architecture


def test_the_first_row_that_fits_is_taken() -> None:
    table = Table(
        KERNEL,
        (
            row("tuned", 64, architectures=(HOPPER,), when={"n": (1, 100)}),
            row("half", 32, dtypes=("fp16",)),
            row("any", 16),
        ),
    )
    chosen = [
        table.choose(capability, dtype, {"n": n})
        for capability, dtype, n in ((90, "bf16", 100), (90, "bf16", 101), (80, "fp16", 5), (80, "fp32", 5))
    ]
    assert [variant and variant.name for variant in chosen] == ["tuned", "any", "half", None]


def test_a_kernel_without_typed_arguments_takes_any_dtype() -> None:
    table = Table(Kernel("count", "module:function", {"n": "*i32"}, ()), (Variant("count", "any", {}),))
    assert table.choose(90, "fp32", {}) is not None


def test_a_row_with_a_missing_constant_or_anothers_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="sets"):
        Table(KERNEL, (Variant("scale", "bad", {}),))
    with pytest.raises(ValueError, match="belongs to other"):
        Table(KERNEL, (Variant("other", "bad", {"BLOCK": 1}),))
    with pytest.raises(ValueError, match="two rows named twice"):
        Table(KERNEL, (row("twice", 1), row("twice", 2)))


def test_a_divisible_argument_must_exist() -> None:
    with pytest.raises(ValueError, match="are not in its signature"):
        Kernel("scale", "module:function", {"x": "*T"}, (), frozenset(("y",)))


def test_grids_and_workspaces_follow_dimensions_and_constants() -> None:
    plan = LaunchPlan("op", (Step("scale", ("ceil_div(n, BLOCK)", "heads")),), {"parts": "4 * n * BLOCK"})
    variant = row("any", 16)
    assert plan.steps[0].blocks({"n": 33, "heads": 2}, variant) == (3, 2, 1)
    assert plan.workspace_bytes({"n": 33}, variant.constants) == {"parts": 4 * 33 * 16}
