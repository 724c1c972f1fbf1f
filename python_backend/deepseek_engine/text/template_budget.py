"""What one rendering of a chat template may cost: passes, bytes and time, counted as it goes.

A template comes with a checkpoint and its values come from clients. Single operations in C cannot be interrupted, so
each is looked at before it is done, and no value may grow beyond what a single operation can go over quickly.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

# Passes of loops, calls and filters, all together.
MAX_PASSES = 1_000_000
MAX_SECONDS = 10.0
# Characters of one text, and of what a rendering gives; a request has 8 MiB at most.
MAX_TEXT = 16 * 2**20
# Items of one list, with those of the lists within it.
MAX_ITEMS = 2**20
# Bytes of everything that a rendering builds, whether or not it is kept.
MAX_BYTES = 512 * 2**20
# The largest number that a function or filter is given; widths and counts of prompts are far below.
MAX_NUMBER = 2**20
MAX_BITS = 4096

_ITEM_BYTES = 8


class TemplateBudgetError(SecurityError):
    """The template loops or grows beyond what any chat needs."""


class TemplateBudget:
    """What is left for one rendering."""

    def __init__(self) -> None:
        self._passes = MAX_PASSES
        self._bytes = MAX_BYTES
        # Of this thread's own work: on a busy machine a rendering may wait for a processor for as long.
        self._end = time.thread_time() + MAX_SECONDS

    def tick(self) -> None:
        """One more pass of a loop, call or filter."""
        self._passes -= 1
        if self._passes < 0:
            raise TemplateBudgetError(f"it loops more than {MAX_PASSES} times")
        if time.thread_time() > self._end:
            raise TemplateBudgetError(f"it runs for more than {MAX_SECONDS:g} s")

    def built(self, value: Any) -> Any:
        """Count a value that was built; returns it."""
        if isinstance(value, str):
            check_text(len(value))
            self._spend(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            self._spend(_ITEM_BYTES * check_tree(value))
        return value

    def _spend(self, size: int) -> None:
        self._bytes -= size
        if self._bytes < 0:
            raise TemplateBudgetError(f"it builds more than {MAX_BYTES >> 20} MiB")


def check_text(length: int) -> None:
    """Refuse a text of `length` characters, built or about to be, that is too long."""
    if length > MAX_TEXT:
        raise TemplateBudgetError(f"it builds a text of more than {MAX_TEXT} characters")


def check_numbers(values: Iterable[Any]) -> None:
    """Refuse arguments that ask for an enormous result, as in `x.ljust(n)`."""
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values):
        raise TemplateBudgetError(f"it calls a function with a number over {MAX_NUMBER}")


def check_tree(value: Any) -> int:
    """Items of a value, those of its items included as often as they are met; refused where they are too many.

    A list that holds another twice, which holds a third twice, is small in memory and endless to write or compare.
    """
    count, left = 0, [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            inner: Iterable[Any] = found.values()
        elif isinstance(found, list | tuple):
            inner = found
        elif isinstance(found, Namespace):
            inner = vars(found)["_Namespace__attrs"].values()
        else:
            continue
        count += len(inner)  # type: ignore[arg-type]
        if count > MAX_ITEMS:
            raise TemplateBudgetError(f"it builds a list of more than {MAX_ITEMS} items")
        left.extend(inner)
    return count


def text_length(values: Iterable[Any]) -> int:
    """Characters that values have as text, at most about; containers are looked through."""
    total, left = 0, list(values)
    while left:
        found = left.pop()
        if isinstance(found, str):
            total += len(found)
        elif isinstance(found, dict):
            left += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple):
            left += found
        else:
            total += 32
        if total > MAX_TEXT:
            return total
    return total
