"""Triton's interpreter with less of its own work: what it finds out again at each call is found out once.

Results are the same. It patches the language anew at every call of a function within a launch, makes a table of types
at every look-up and a type of the shape of every tensor, and looks in int64 for overflows of which it then tells
nobody: together two thirds of a kernel's time.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Change the interpreter of this process; one that is made otherwise stays as it is."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, interpreter._LangPatchScope)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _kept(interpreter._get_np_dtype)
    language.tensor.__init__ = _tensor  # type: ignore[method-assign]
    if not interpreter.interpreter_builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = _not_looked_at


_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`, with one shape for all tensors of it."""
    self.handle = handle
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _shapes:
        sizes = language.tuple([language.constexpr(size) for size in shape])
        _shapes[shape] = language.constexpr(math.prod(shape)), sizes
    self.numel, self.shape = _shapes[shape]
    self.type = type
    self.dtype = type.scalar


def _not_looked_at(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """In the place of a search for overflow, whose outcome nobody reads outside of the debug mode."""


def _once_a_launch(patch: Callable[[Any], Any], empty: Callable[[], Any]) -> Callable[[Any], Any]:
    seen: dict[int, frozenset[int]] = {}
    patched: set[int] = set()

    def patch_lang(function: Any) -> Any:
        names = function.__globals__
        # Modules stay, and so do the names in them that the language goes by.
        if id(names) not in seen:
            seen[id(names)] = frozenset(
                id(each) for each in names.values() if each is language or each is language.core
            )
        if seen[id(names)] <= patched:
            return empty()
        scope = patch(function)
        outermost, restore = not patched, scope.restore
        patched.update(seen[id(names)])

        def restored() -> None:
            restore()
            if outermost:
                patched.clear()

        scope.restore = restored
        return scope

    return patch_lang


def _kept(find: Callable[[Any], "np.dtype[Any]"]) -> Callable[[Any], "np.dtype[Any]"]:
    known: dict[tuple[type, str], np.dtype[Any]] = {}

    def np_dtype(kind: Any) -> "np.dtype[Any]":
        # A block has the type of its elements, whatever its shape.
        element = getattr(kind, "element_ty", kind) if kind.is_block() else kind
        key = type(element), element.name
        if key not in known:
            known[key] = find(kind)
        return known[key]

    return np_dtype
