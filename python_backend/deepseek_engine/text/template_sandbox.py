"""The Jinja environment that chat templates are rendered in.

It has what Hugging Face templates use (transformers' chat template documentation): trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes and the `generation` block. Templates come with
checkpoints, so they run sandboxed and within a budget.
"""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_LOOP_PASSES = 1_000_000
MAX_TEXT = 64 * 1024 * 1024

_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\d{8,}|\*)")

# A name in the context that no template can spell, so that none can refill its budget.
_BUDGET = "loop passes left"


class TemplateRefusalError(TemplateError):
    """The template itself refused the messages, by `raise_exception`."""


class TemplateBudgetError(SecurityError):
    """The template loops or grows beyond what any chat needs."""


def _raise_exception(message: str) -> None:
    raise TemplateRefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _within_budget(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """Count the passes of one loop against the budget of the whole rendering."""
    budget = context[_BUDGET]
    for value in values:
        budget[0] -= 1
        if budget[0] < 0:
            raise TemplateBudgetError(f"it loops more than {MAX_LOOP_PASSES} times")
        yield value


def _of_bounded_size(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_TEXT:
        raise TemplateBudgetError(f"it builds a text of more than {MAX_TEXT} characters")
    return value


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates so that neither their loops nor the texts they build outgrow a budget.

    Counted are the passes of all loops of a rendering, bounded are the results of operators and calls. This stops
    accidents and plain malice; filters that pad a text are not bounded.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters[_BUDGET] = _within_budget
        self.filters["of bounded size"] = _of_bounded_size
        # It writes as many paragraphs as it is asked for, and no chat needs any.
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be far larger than its operands."""
        if operator == "*":
            self._check_repeat(left, right)
            self._check_repeat(right, left)
        if operator == "%" and isinstance(left, str) and _WIDE_FIELD.search(left):
            raise TemplateBudgetError("it formats a field too wide")
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= 64):
            raise TemplateBudgetError("it raises a number to a power too large")
        return _of_bounded_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, unless a number given asks for an enormous result (as in `x.ljust(n)`)."""
        if function is not range and any(isinstance(one, int) and one > MAX_TEXT for one in args):
            raise TemplateBudgetError(f"it calls a function with a number over {MAX_TEXT}")
        return _of_bounded_size(super().call(context, function, *args, **kwargs))

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Render with a fresh budget; raises what the template raises."""
        return template.render({**variables, _BUDGET: [MAX_LOOP_PASSES]})

    @staticmethod
    def _check_repeat(value: Any, times: Any) -> None:
        if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_TEXT:
            raise TemplateBudgetError(f"it repeats a text to more than {MAX_TEXT} characters")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._filtered(loop.iter, _BUDGET)
        # A recursive loop calls `loop` with what it goes over next.
        for call in list(tree.find_all(nodes.Call)):
            if isinstance(call.node, nodes.Name) and call.node.name == "loop":
                call.args = [self._filtered(argument, _BUDGET) for argument in call.args]
        self._bound_concatenations(tree)
        return tree

    def _bound_concatenations(self, node: nodes.Node) -> None:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                self._bound_concatenations(value)
                if isinstance(value, nodes.Concat):
                    setattr(node, field, self._filtered(value, "of bounded size"))
            elif isinstance(value, list):
                self._bound_in_list(value)

    def _bound_in_list(self, values: list[Any]) -> None:
        for position, value in enumerate(values):
            if isinstance(value, nodes.Node):
                self._bound_concatenations(value)
            if isinstance(value, nodes.Concat):
                values[position] = self._filtered(value, "of bounded size")

    @staticmethod
    def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
