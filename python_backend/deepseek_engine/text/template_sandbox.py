"""The Jinja environment that chat templates are rendered in.

It has what Hugging Face templates use (transformers' chat template documentation): trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes and the `generation` block. Templates come with
checkpoints, so they run sandboxed and within a budget.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepseek_engine.text.template_budget import (
    MAX_BITS,
    MAX_ITEMS,
    TemplateBudget,
    TemplateBudgetError,
    check_numbers,
    check_text,
    check_tree,
    text_length,
)

# Characters of a template's source; public ones have some ten thousand.
MAX_SOURCE = 2**20
# Characters of what a template says when it refuses messages.
MAX_REFUSAL = 500

# Filters that make far more of a text than it was, or search it again and again, and that no chat needs.
_LEFT_OUT = ("pprint", "urlize", "wordwrap", "xmlattr", "striptags", "forceescape", "random")
# Filters that go over a list and not into its items, so that a list may be large.
_SHALLOW = frozenset({"length", "count", "first", "last", "default", "d", "list", "reverse", "items"})
_SHALLOW_LAZY = frozenset({"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice"})

_WIDE_FIELD = re.compile(r"\d{8,}|\*")
_NESTED_FIELD = re.compile(r":[^{}]*\{")
_WIDE_DATE = re.compile(r"%[^a-zA-Z%]*\d{3,}")

# Names of filters that no template can spell.
_PASSES = "count the passes"
_TICK = "one more pass"
_BUILT = "of bounded size"
_JOINED = "one after the other"

# Text between expressions is counted where it is long enough to matter in a loop.
_SHORT_DATA = 32


class TemplateRefusalError(TemplateError):
    """The template itself refused the messages, by `raise_exception`."""


def _raise_exception(message: Any) -> None:
    check_tree(message)
    raise TemplateRefusalError(str(message)[:MAX_REFUSAL])


def _strftime_now(form: str) -> str:
    if _WIDE_DATE.search(form):
        raise TemplateBudgetError("it formats a field too wide")
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    depth = indent if isinstance(indent, int) else text_length([indent]) if indent else 0
    check_text(check_tree(value) * depth)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates so that neither their work nor what they build outgrows a budget.

    Every loop, call, filter, test, comparison and operator passes through here; see `template_budget` for the limits.
    """

    intercepted_binops = frozenset(("+", "-", "*", "**", "%", "//", "/"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=self._written
        )
        self._running = threading.local()
        self.filters["tojson"] = _tojson
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters = {name: self._bounded_filter(name, made) for name, made in self.filters.items()}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: self._bounded_test(made) for name, made in tests.items()}
        # With the context they are not applied before there is a budget.
        self.filters[_PASSES] = pass_context(lambda _, values: self._passes(values))
        self.filters[_TICK] = pass_context(lambda _, value: self._ticked(value))
        self.filters[_JOINED] = pass_context(lambda _, values: self._joined(values))
        self.filters[_BUILT] = pass_context(lambda _, value: self._budget.built(value))
        # It writes as many paragraphs as it is asked for, and no chat needs any.
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be far larger than its operands."""
        self._budget.tick()
        if isinstance(left, int) and isinstance(right, int):
            _check_power(operator, left, right)
        elif operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return self._budget.built(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, unless what it gives would be enormous."""
        self._budget.tick()
        if function is not range:
            check_numbers((*args, *kwargs.values()))
        _check_method(function, args, kwargs)
        return self._budget.built(super().call(context, function, *args, **kwargs))

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Render with a fresh budget; raises what the template raises."""
        self._running.budget = TemplateBudget()
        try:
            length, parts = 0, []
            for part in template.generate(variables):
                length += len(part)
                check_text(length)
                parts.append(part)
            return "".join(parts)
        finally:
            self._running.budget = None

    @property
    def _budget(self) -> TemplateBudget:
        budget: TemplateBudget | None = getattr(self._running, "budget", None)
        if budget is None:
            # While a template is compiled: constants are not worked out beforehand.
            raise TemplateBudgetError("nothing is rendered")
        return budget

    def _ticked(self, value: Any) -> Any:
        self._budget.tick()
        return value

    def _passes(self, values: Iterable[Any]) -> Iterator[Any]:
        budget = self._budget
        for value in values:
            budget.tick()
            yield value

    def _joined(self, values: list[Any]) -> str:
        """What `a ~ b` gives."""
        self._budget.tick()
        check_tree(values)
        check_text(text_length(values))
        text: str = self._budget.built("".join(map(str, values)))
        return text

    def _written(self, value: Any) -> Any:
        """What an expression writes."""
        if not isinstance(value, str):
            check_tree(value)
        return self._ticked(value)

    def _bounded_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        # Before the value come the context or environment, where a filter asks for them.
        skipped = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._budget.tick()
            given = args[skipped:]
            if name in _SHALLOW:
                return self._listed(made(*args, **kwargs))
            check_numbers((*given[1:], *kwargs.values()))
            if name in _SHALLOW_LAZY:
                return self._counted(made(*args, **kwargs))
            if not isinstance(given[0], str | list | tuple | dict | int | float | None):
                # What is only gone over once, such as the result of `map`.
                given = (self._gathered(given[0]), *given[1:])
            for value in given:
                check_tree(value)
            _check_filter(name, given, kwargs)
            return self._budget.built(made(*args[:skipped], *given, **kwargs))

        return bounded

    def _bounded_test(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._budget.tick()
            return made(*args, **kwargs)

        return bounded

    def _gathered(self, values: Any) -> Any:
        if not isinstance(values, Iterator):
            return values
        return self._listed(list(self._counted(values)))

    def _listed(self, value: Any) -> Any:
        if isinstance(value, list):
            self._budget.built(value)
        return value

    def _counted(self, values: Any) -> Any:
        return self._passes(values) if isinstance(values, Iterator) else values

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateBudgetError(f"it has more than {MAX_SOURCE} characters")
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, _PASSES)
        for comparison in list(tree.find_all(nodes.Compare)):
            comparison.expr = _filtered(comparison.expr, _TICK)
        # A recursive loop calls `loop` with what it goes over next.
        for call in list(tree.find_all(nodes.Call)):
            if isinstance(call.node, nodes.Name) and call.node.name == "loop":
                call.args = [_filtered(argument, _PASSES) for argument in call.args]
        _replace(tree)
        return tree


def _replace(node: nodes.Node) -> None:
    """Have everything below `node` that builds a value count it."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace(value)
            setattr(node, field, _counting(value))
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace(item)
                    value[position] = _counting(item)


def _counting(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.TemplateData) and len(node.data) > _SHORT_DATA:
        return _filtered(nodes.Const(node.data, lineno=node.lineno), _BUILT)
    if isinstance(node, nodes.Concat):
        # All parts at once, so that no sum is written before it is looked at.
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), _JOINED)
    slices = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.ctx == "load"
    literal = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    return _filtered(node, _BUILT) if slices or literal else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


def _check_power(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    if operator in ("*", "**") and bits > MAX_BITS:
        raise TemplateBudgetError("it raises a number to a power too large")


def _check_repeat(value: Any, times: Any) -> None:
    if not isinstance(times, int):
        return
    if isinstance(value, str):
        check_text(len(value) * times)
    elif isinstance(value, list | tuple) and len(value) * times > MAX_ITEMS:
        raise TemplateBudgetError(f"it builds a list of more than {MAX_ITEMS} items")


def _check_format(form: str, values: Iterable[Any]) -> None:
    if _WIDE_FIELD.search(form):
        raise TemplateBudgetError("it formats a field too wide")
    values = list(values)
    check_tree(values)
    fields = form.count("%") + form.count("{")
    check_text(len(form) + fields * max((text_length([value]) for value in values), default=0))


def _check_method(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Look at a method of a text before it makes far more of it."""
    method = getattr(function, "__wrapped__", function)
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return
    if name in ("format", "format_map"):
        if _NESTED_FIELD.search(text):
            raise TemplateBudgetError("it formats a field too wide")
        _check_format(text, (*args, *kwargs.values()))
    elif name == "translate":
        check_text(len(text) * max(1, text_length(args)))
    elif name == "expandtabs":
        check_text(len(text) + text.count("\t") * next((size for size in args if isinstance(size, int)), 8))
    elif name == "replace" and len(args) >= 2:
        _check_replace(text, *args[:2])
    elif name == "join" and args:
        _check_join(args[0], text)


def _check_filter(name: str, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Look at a filter before it makes far more of a text."""
    value, *rest = given
    if name == "format" and isinstance(value, str):
        _check_format(value, (*rest, *kwargs.values()))
    elif name == "replace" and len(rest) >= 2:
        _check_replace(str(value), *rest[:2])
    elif name == "replace":
        _check_replace(str(value), *(str(kwargs.get(key, "")) for key in ("old", "new")))
    elif name == "join":
        _check_join(value, rest[0] if rest else kwargs.get("d", ""))
    elif name == "indent" and isinstance(value, str):
        width = rest[0] if rest else kwargs.get("width", 4)
        check_text(len(value) + (value.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    elif name == "sum" and not isinstance(rest[1] if len(rest) > 1 else kwargs.get("start", 0), int | float):
        raise TemplateBudgetError("it sums up what are no numbers")


def _check_replace(text: str, old: Any, new: Any) -> None:
    times = text.count(str(old)) if old else len(text) + 1
    check_text(len(text) + times * len(str(new)))


def _check_join(values: Any, between: Any) -> None:
    if isinstance(values, list | tuple | dict):
        check_text(text_length(values) + len(values) * len(str(between)))
