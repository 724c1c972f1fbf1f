"""Prompts that have a gap, for checkpoints whose tokenizer has DeepSeek-Coder's tokens for it.

The layout is that of DeepSeek-Coder's model card: begin, what stands before, hole, what stands after, end.
"""

import json
from pathlib import Path

from piccard_contract.errors import ErrorCode
from piccard_contract.file_watch import FileWatch, Signature
from piccard_contract.home import Service
from piccard_contract.version_file import Runner, VersionFileError, read_version_file

from piccard_gateway.errors import refused

BEGIN, HOLE, END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


def with_gap(before: str, after: str) -> str:
    """The prompt whose continuation belongs between the two texts."""
    return f"{BEGIN}{before}{HOLE}{after}{END}"


class GapTokens:
    """Tells which versions can fill a gap, by the tokenizer.json of their checkpoints, each read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, Signature | None], bool] = {}

    def check(self, service: Service, versions: list[int]) -> None:
        """Refuse a suffix unless all versions that may serve have the tokens.

        Raises:
            ApiError: 422 with the version that has them not.
        """
        for version in versions:
            if not self._has(service, version):
                sentence = f"version {version}'s tokenizer has no tokens to fill in the middle; leave suffix out"
                raise refused(ErrorCode.UNSUPPORTED, sentence, "suffix")

    def _has(self, service: Service, version: int) -> bool:
        try:
            file = read_version_file(service.version_folder(version))
        except (OSError, VersionFileError):
            return False
        if file.runner is Runner.SCRIPTED:
            return False
        path = service.home / file.checkpoint / "tokenizer.json"
        key = (path, FileWatch(path).signature())
        if key not in self._known:
            self._known[key] = _holds_tokens(path)
        return self._known[key]


def _holds_tokens(path: Path) -> bool:
    try:
        content = json.loads(path.read_bytes())
        added = {token["content"] for token in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return {BEGIN, HOLE, END} <= added
