"""Formulas over names, as deepseek_engine.kernels.variants evaluates them, in C++."""

import ast
from collections.abc import Mapping
from functools import lru_cache

FUNCTIONS = ("ceil_div", "min", "max", "next_power_of_2")
"""Those of variants.evaluate; csrc/shared/spec.h has each by the same name."""


@lru_cache(maxsize=1024)
def names_in(formula: str) -> frozenset[str]:
    """The names that a formula reads, functions left out."""
    tree = ast.parse(formula, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called)


def to_cpp(formula: str, names: Mapping[str, str]) -> str:
    """The C++ expression; `names` says what each name is there. Values are not negative, so // is C++'s division."""
    return _cpp(ast.parse(formula, mode="eval").body, names)


def _cpp(node: ast.expr, names: Mapping[str, str]) -> str:
    match node:
        case ast.Constant(value=int(number)):
            return f"INT64_C({number})"
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            sign = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/"}[type(op)]
            return f"({_cpp(left, names)} {sign} {_cpp(right, names)})"
        case ast.Call(func=ast.Name(id=name), args=args) if name in FUNCTIONS:
            return f"{name}({', '.join(_cpp(argument, names) for argument in args)})"
    raise ValueError(f"{ast.unparse(node)} cannot be written in C++")
