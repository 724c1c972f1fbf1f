"""What an operator of the domain com.deepseek is, as plain data.

C++ registration, checks and shape inference, the schemas for onnx.checker and docs/custom_ops.md are all generated from
these rows. Sizes are formulas: a bare name that is no attribute is a free size, bound by the first input that has it;
anything else (`num_heads * head_dim`, `R + 1`, `1`) has to hold once its names are known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from deepseek_engine.kernels.variants import evaluate

from deepseek_ops.formula import names_in

DOMAIN = "com.deepseek"
OPSET = 1
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
ELEMENT_TYPES: Mapping[str, int] = {
    "float": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "double": 11,
    "uint32": 12,
    "uint64": 13,
    "bfloat16": 16,
    "float8e4m3fn": 17,
}
"""Names to the numbers of ONNX's TensorProto.DataType, which are ONNX Runtime's too."""


class ShapeError(ValueError):
    """Shapes or attributes that an operator does not take."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input.

    Attributes:
        type: an element type, or the name of a type constraint: inputs of one constraint have one type.
        shape: a formula for each dimension.
        panels: a weight [.., out, in] of floats that only products read: a session in which it is constant copies it
            once into the order in which they do.
        host: whether it is read in the host's memory on every provider.
        required: providers on which it has to be given although it is optional.
        refused: providers that do not take it, each with what to do instead.
    """

    name: str
    type: str
    shape: tuple[str, ...]
    doc: str
    optional: bool = False
    panels: bool = False
    host: bool = False
    required: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """One output.

    Attributes:
        type, shape: as of an input; every name has to be known from the inputs.
        alias: the input that it has to share its memory with.
    """

    name: str
    type: str
    shape: tuple[str, ...]
    doc: str
    optional: bool = False
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute.

    Attributes:
        default: its type is the attribute's; None for one that has to be given, of type `kind`.
        kind: "int", "float" or "string".
        minimum: of an integer.
        choices: all that a string may be.
        refused: choices that are known but not built, each with what to do instead.
    """

    name: str
    kind: str
    doc: str
    default: int | float | str | None = None
    minimum: int = 0
    choices: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Requirement:
    """`left` <= `right`, or == where `equal`: formulas over attributes and sizes.

    Attributes:
        provider: the only one on which it has to hold; None for all.
    """

    left: str
    right: str
    equal: bool = False
    provider: str | None = None

    def __str__(self) -> str:
        return f"{self.left} {'==' if self.equal else '<='} {self.right}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|result - reference| <= absolute + relative * |reference|."""

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Operator:
    """One row.

    Attributes:
        name: of the ONNX operator.
        kernel: the C++ namespace with its function `compute`.
        reference: "module:function" of the torch reference that tests compare it with.
        doc: what it computes.
        types: type constraint to the element types that it takes.
        refused_types: (constraint, element type) that are known but not built, each with what to do instead.
        requirements: what has to hold between attributes and sizes.
        tolerance: element type of the first input to how far from the reference the result may be.
        providers: execution providers that have a kernel.
        cuda: what differs in types on CUDA: a parameter or a constraint to its element types there, or to the
            constraint that it is one with.
    """

    name: str
    kernel: str
    reference: str
    doc: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Attribute, ...] = ()
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused_types: Mapping[tuple[str, str], str] = field(default_factory=dict)
    requirements: tuple[Requirement, ...] = ()
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    providers: tuple[str, ...] = (CPU,)
    cuda: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    since_version: int = OPSET

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            if parameter.type not in self.types and parameter.type not in ELEMENT_TYPES:
                raise ValueError(f"{self.name}: {parameter.name} is of unknown type {parameter.type}")
        required = {name for each in self.inputs if not each.optional for size in each.shape for name in names_in(size)}
        for output in self.outputs:
            for size in output.shape:
                unknown = names_in(size) - required - set(self.integers)
                if unknown:
                    raise ValueError(f"{self.name}: output {output.name} has sizes that no input gives: {unknown}")

    @property
    def parameters(self) -> list[Input | Output]:
        """Inputs, then outputs."""
        return [*self.inputs, *self.outputs]

    @property
    def integers(self) -> tuple[str, ...]:
        """Attributes that formulas may name."""
        return tuple(attribute.name for attribute in self.attributes if attribute.kind == "int")

    @property
    def sizes(self) -> tuple[str, ...]:
        """The free sizes, in the order in which inputs bind them."""
        free = (size for each in self.inputs for size in each.shape if size.isidentifier())
        return tuple(dict.fromkeys(size for size in free if size not in self.integers))

    def on(self, provider: str) -> "Operator":
        """The row as a provider has it: its types, what has to be given and to hold, no panels where weights stay as
        they are."""
        types = dict(self.types)
        if provider == CUDA:
            types = {
                name: self._cuda_types(name)
                for name in dict.fromkeys((*self.types, *(kind for kind in self.cuda if kind in self.types)))
                if not isinstance(self.cuda.get(name), str)
            }
        inputs = tuple(
            replace(
                self._typed(each, provider),
                optional=each.optional and provider not in each.required,
                panels=each.panels and provider == CPU,
            )
            for each in self.inputs
        )
        outputs = tuple(self._typed(each, provider) for each in self.outputs)
        refused = {key: why for key, why in self.refused_types.items() if key[1] in types.get(key[0], ())}
        requirements = tuple(
            replace(each, provider=None) for each in self.requirements if each.provider in (None, provider)
        )
        return replace(
            self,
            inputs=inputs,
            outputs=outputs,
            types=types,
            refused_types=refused,
            requirements=requirements,
            cuda={},
        )

    def _cuda_types(self, name: str) -> tuple[str, ...]:
        found = self.cuda.get(name, self.types[name])
        assert not isinstance(found, str)
        return found

    def _typed(self, parameter: "_P", provider: str) -> "_P":
        """With the type that it has on a provider."""
        if provider != CUDA:
            return parameter
        wanted = self.cuda.get(parameter.name, self.cuda.get(parameter.type))
        return replace(parameter, type=wanted) if isinstance(wanted, str) else parameter

    def anchors(self) -> tuple[Input, ...]:
        """The inputs whose types decide those of the outputs, one for each constraint that an output has."""
        wanted = dict.fromkeys(output.type for output in self.outputs if output.type in self.types)
        first = {name: next(each for each in self.inputs if each.type == name) for name in wanted}
        return tuple(sorted(first.values(), key=self.inputs.index))

    def accepted(self, parameter: Input | Output) -> tuple[str, ...]:
        """The element types that a parameter may have."""
        return self.types.get(parameter.type, (parameter.type,))

    def accepted_anywhere(self, parameter: Input | Output) -> tuple[str, ...]:
        """The element types that a parameter may have on any provider."""
        rows = [self.on(provider) for provider in self.providers]
        found = [
            kind
            for row in rows
            for each in row.parameters
            if each.name == parameter.name and type(each) is type(parameter)
            for kind in row.accepted(each)
        ]
        return tuple(dict.fromkeys(found))

    def bind(
        self, shapes: Sequence[Sequence[int | None] | None], attributes: Mapping[str, int | float | str]
    ) -> dict[str, int]:
        """What the names are, given the inputs' shapes (None: absent or unknown) and the attributes.

        Raises:
            ShapeError: a rank, a size or a requirement does not hold.
        """
        values = {name: int(attributes[name]) for name in self.integers}
        for parameter, size, found in self._given(shapes):
            if size.isidentifier() and size not in values and found is not None:
                if found < 1:
                    raise ShapeError(
                        f"{self.name}: {size} of input {parameter.name} is {found}; it has to be at least 1"
                    )
                values[size] = found
        for parameter, size, found in self._given(shapes):
            if found is not None and names_in(size) <= set(values) and evaluate(size, values) != found:
                raise ShapeError(
                    f"{self.name}: input {parameter.name} has {found} where {size} = {evaluate(size, values)} is wanted"
                )
        for requirement in self.requirements:
            # The row as no provider has it is for graphs of any.
            if requirement.provider is None:
                self._check(requirement, values)
        return values

    def output_shape(self, output: Output, values: Mapping[str, int]) -> list[int | None]:
        """An output's shape, None for what is not known."""
        return [evaluate(size, values) if names_in(size) <= set(values) else None for size in output.shape]

    def _given(self, shapes: Sequence[Sequence[int | None] | None]) -> Iterator[tuple[Input, str, int | None]]:
        for parameter, shape in zip(self.inputs, shapes, strict=False):
            if shape is None:
                continue
            if len(shape) != len(parameter.shape):
                raise ShapeError(
                    f"{self.name}: input {parameter.name} has {len(shape)} dimensions,"
                    f" [{', '.join(parameter.shape)}] is wanted"
                )
            for size, found in zip(parameter.shape, shape, strict=True):
                yield parameter, size, found

    def _check(self, requirement: Requirement, values: Mapping[str, int]) -> None:
        if not names_in(requirement.left) | names_in(requirement.right) <= set(values):
            return
        left, right = evaluate(requirement.left, values), evaluate(requirement.right, values)
        if left != right if requirement.equal else left > right:
            raise ShapeError(f"{self.name}: {requirement} does not hold: {left} and {right}")


_P = TypeVar("_P", Input, Output)
