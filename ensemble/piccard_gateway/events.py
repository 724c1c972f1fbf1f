"""Server-sent events, and JSON as text: what stands in every event of a stream is written once."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"

text_json = json.dumps


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def event(value: Any) -> bytes:
    """One event with a JSON object."""
    return f"data: {compact(value)}\n\n".encode()
