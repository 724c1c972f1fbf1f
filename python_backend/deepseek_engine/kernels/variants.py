"""What a device kernel is, how it may be compiled and how it is launched, as plain data.

The just-in-time launcher, the ahead-of-time compiler and a generated C++ launcher all read these rows, so that one
source serves them without drift. Nothing here imports triton.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, MappingProxyType

AMPERE, ADA, HOPPER = 80, 89, 90
ARCHITECTURES = (AMPERE, ADA, HOPPER)
SHARED_MEMORY_LIMITS: Mapping[int, int] = MappingProxyType({AMPERE: 163 * 1024, ADA: 99 * 1024, HOPPER: 227 * 1024})
"""Bytes of shared memory that one block may use."""
POINTER_ALIGNMENT, INTEGER_ALIGNMENT = 16, 8
"""What a divisible pointer (bytes) and a divisible integer (elements) are multiples of: with two-byte elements, what a
copy of 16 bytes needs. Without it no copy is asynchronous."""
DTYPES = ("bf16", "fp16")
UNBOUNDED = 2**62

Range = tuple[int, int]


class FormulaError(ValueError):
    """A formula uses what a generated launcher could not translate, or a name that nothing defines."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


_FUNCTIONS: dict[str, Callable[..., int]] = {
    "ceil_div": ceil_div,
    "min": min,
    "max": max,
    "next_power_of_2": next_power_of_2,
}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """The value of an integer formula: names, numbers, + - * //, ceil_div, min, max and next_power_of_2.

    Raises:
        FormulaError: the formula holds anything else, or a name that `values` lacks.
    """
    code = _compiled(formula)
    try:
        value: int = eval(code, {"__builtins__": {}, **_FUNCTIONS}, values)
    except NameError as error:
        raise FormulaError(f"formula {formula!r}: {error.name} is not among {sorted(values)}") from None
    return value


@lru_cache(maxsize=1024)
def _compiled(formula: str) -> CodeType:
    """Plans are evaluated at every launch, so a formula is read and checked once."""
    tree = ast.parse(formula, mode="eval")
    _check(tree.body, formula)
    return compile(tree, "<formula>", "eval")


def _check(node: ast.expr, formula: str) -> None:
    match node:
        case ast.Constant(value=int()) | ast.Name():
            return
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            _check(left, formula)
            _check(right, formula)
            return
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            for argument in args:
                _check(argument, formula)
            return
    raise FormulaError(f"formula {formula!r}: {ast.unparse(node)} is none of names, numbers, + - * // and functions")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One device function's launch interface.

    Attributes:
        name: unique in the catalogue.
        entry: "module:function" of the @triton.jit function.
        signature: run-time arguments in order, to types as Triton spells them; "T" stands for the variant's dtype, so
            "*T" is a pointer to it.
        constants: the function's constexpr parameters, in order, after the run-time ones.
        divisible: arguments declared as multiples, pointers of 16 bytes and integers of 8 elements. The launcher checks
            them; no other value is specialised on, so that one variant is one binary.
        chained: whether the function's last parameter is CHAINED (`chaining.py`), which the launcher sets by the
            architecture.
    """

    name: str
    entry: str
    signature: Mapping[str, str]
    constants: tuple[str, ...]
    divisible: frozenset[str] = frozenset()
    chained: bool = False

    def __post_init__(self) -> None:
        unknown = self.divisible - set(self.signature)
        if unknown:
            raise ValueError(f"kernel {self.name}: divisible arguments {sorted(unknown)} are not in its signature")

    def __hash__(self) -> int:
        return hash(self.name)

    def alignment(self, argument: str) -> int:
        """What a divisible argument is a multiple of."""
        return POINTER_ALIGNMENT if self.signature[argument].startswith("*") else INTEGER_ALIGNMENT

    @property
    def is_typed(self) -> bool:
        """Whether its binaries differ by dtype."""
        return any("T" in spelled for spelled in self.signature.values())


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compile a kernel, and for what it is meant.

    Attributes:
        kernel: the kernel's name.
        name: unique among the kernel's rows.
        constants: every constexpr parameter.
        num_warps, num_stages: as Triton takes them; stages are the depth of the software pipeline.
        architectures: compute capabilities (80, 89, 90) that the row is declared for. A newer minor version takes the
            rows of the nearest lower one of its major version.
        dtypes: what "T" may be.
        when: dimension to inclusive range; a dimension that is not named may be anything.
        stack_bytes: local memory a thread that the row is known to use, and accepts; 0 is the rule.
        blocks_per_multiprocessor: how many of its blocks a multiprocessor holds, for grids sized by the device.
        wide_tiles: whether the row's products have tiles of 64 rows and more, so that sm_90 must show wgmma.
    """

    kernel: str
    name: str
    constants: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3
    architectures: tuple[int, ...] = ARCHITECTURES
    dtypes: tuple[str, ...] = DTYPES
    when: Mapping[str, Range] = field(default_factory=dict)
    stack_bytes: int = 0
    blocks_per_multiprocessor: int = 1
    wide_tiles: bool = False

    def __hash__(self) -> int:
        return hash((self.kernel, self.name))

    def fits(self, dims: Mapping[str, int]) -> bool:
        """Whether every dimension lies in its range; one that is named here and missing there does not."""
        return all(name in dims and low <= dims[name] <= high for name, (low, high) in self.when.items())


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of a plan: a kernel and its grid, formulas over the dimensions and the variant's constants."""

    kernel: str
    grid: tuple[str, ...]

    def blocks(self, dims: Mapping[str, int], variant: Variant) -> tuple[int, int, int]:
        values = {**dims, **variant.constants}
        x, y, z = (*(evaluate(formula, values) for formula in self.grid), 1, 1)[:3]
        return x, y, z


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """An operator's launches in order, and the scratch memory they share.

    Attributes:
        operator: the operator's name.
        steps: the launches.
        workspaces: scratch buffer to its bytes, formulas over the dimensions and the first step's constants.
    """

    operator: str
    steps: tuple[Step, ...]
    workspaces: Mapping[str, str] = field(default_factory=dict)

    def workspace_bytes(self, dims: Mapping[str, int], constants: Mapping[str, int] | None = None) -> dict[str, int]:
        values = {**dims, **(constants or {})}
        return {name: evaluate(formula, values) for name, formula in self.workspaces.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A kernel with its rows; the first row that fits is taken, so tuned rows stand before general ones."""

    kernel: Kernel
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for variant in self.variants:
            if variant.kernel != self.kernel.name:
                raise ValueError(f"row {variant.name} belongs to {variant.kernel}, not to {self.kernel.name}")
            if set(variant.constants) != set(self.kernel.constants):
                raise ValueError(
                    f"row {variant.name} of {self.kernel.name} sets {sorted(variant.constants)},"
                    f" the kernel takes {sorted(self.kernel.constants)}"
                )
            if variant.name in names:
                raise ValueError(f"kernel {self.kernel.name} has two rows named {variant.name}")
            names.add(variant.name)

    def choose(self, capability: int, dtype: str, dims: Mapping[str, int]) -> Variant | None:
        """The first row for the architecture, dtype and shape, or None."""
        architecture = nearest_architecture(capability)
        for variant in self.variants:
            typed = dtype in variant.dtypes or not self.kernel.is_typed
            if typed and architecture in variant.architectures and variant.fits(dims):
                return variant
        return None


def nearest_architecture(capability: int) -> int | None:
    """The declared architecture whose binaries run on a device of `capability` (8.6 runs those of 8.0)."""
    candidates = [arch for arch in ARCHITECTURES if arch <= capability and arch // 10 == capability // 10]
    return max(candidates, default=None)
