"""Stop strings over a stream of text.

An Aho-Corasick automaton (Aho and Corasick, CACM 1975) walks the text once: its depth is the length of the longest
ending that may still grow into a stop string, which is exactly what has to be held back.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """Finds the first place at which any of the stop strings is complete.

    Node 0 is the root; every node is a beginning of a stop string.

    Attributes:
        depth: length of each node's string.
        stop: the longest stop string that ends at each node, or None.
    """

    __slots__ = ("_back", "_next", "depth", "longest", "stop")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._back = [0]
        self.depth = [0]
        self.stop: list[str | None] = [None]
        self.longest = max(map(len, stops), default=0)
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, node: int, letter: str) -> int:
        """The node after one more letter."""
        while node and letter not in self._next[node]:
            node = self._back[node]
        return self._next[node].get(letter, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for letter in stop:
            if letter not in self._next[node]:
                self._next[node][letter] = len(self.depth)
                self._next.append({})
                self._back.append(0)
                self.depth.append(self.depth[node] + 1)
                self.stop.append(None)
            node = self._next[node][letter]
        self.stop[node] = stop

    def _link(self) -> None:
        """Point every node back to the longest proper ending of its string that is a node, shallow ones first."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for letter, child in self._next[node].items():
                self._back[child] = self.step(self._back[node], letter)
                # Of two that end here the longer wins, so that less of it is told; a node's own string is longest.
                self.stop[child] = self.stop[child] or self.stop[self._back[child]]
                queue.append(child)


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopStrings:
    """Lets text through until a stop string is complete, and never lets the first letters of one through.

    The stop string that is complete first wins, the longest of those that end at the same letter; so the result does
    not depend on how the text is cut into pushes.

    At any time: text pushed = text released + text held back, and what is held back is the longest ending of the text
    that begins a stop string. After a match the text after the stop string is dropped, and so is the stop string itself
    unless it is to be included.

    Args:
        stops: non-empty strings; none lets everything through.
        include_stop_str_in_output: release the stop string too.
        seen: text before the first push that was sent already. A stop string that begins in it is found, but no letter
            of it is released again and none can be taken back. A stop string wholly within it is not reported.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False, seen: str = "") -> None:
        self._include = include_stop_str_in_output
        self._automaton = _automaton(tuple(stops))
        self._node = 0
        self._held = ""
        # Letters at the head of the held text that were sent before the first push.
        self._sent = 0
        self.stop: str | None = None
        if seen and stops:
            self._see(seen[-self._automaton.longest :])

    def push(self, text: str, *, match: bool = True) -> tuple[str, str | None]:
        """Take text that follows.

        Args:
            text: what comes next; may be empty.
            match: False lets a stop string that is complete within this text pass (used until min_tokens); one that
                only begins in it still counts when it is completed later.

        Returns:
            the text to release now, and the stop string once one was matched (then and ever after).
        """
        if self.stop is not None:
            return "", self.stop
        if not self._automaton.longest:
            return text, None
        node, automaton = self._node, self._automaton
        for position, letter in enumerate(text, start=len(self._held) + 1):
            node = automaton.step(node, letter)
            if match and (stop := automaton.stop[node]) is not None:
                return self._end(self._held + text, position, stop), stop
        return self._keep(self._held + text, node), None

    def flush(self) -> str:
        """The text still held back, when the text ends without a stop string; empty after a match."""
        text, self._held, self._node, self._sent = self._held[self._sent :], "", 0, 0
        return text

    def _see(self, seen: str) -> None:
        for letter in seen:
            self._node = self._automaton.step(self._node, letter)
        self._sent = self._automaton.depth[self._node]
        self._held = seen[len(seen) - self._sent :]

    def _end(self, text: str, position: int, stop: str) -> str:
        self.stop = stop
        cut = position if self._include else position - len(stop)
        released = text[self._sent : cut]
        self._held, self._sent = "", 0
        return released

    def _keep(self, text: str, node: int) -> str:
        cut = len(text) - self._automaton.depth[node]
        released = text[self._sent : cut]
        self._node, self._held, self._sent = node, text[cut:], max(0, self._sent - cut)
        return released
