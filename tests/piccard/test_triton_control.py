"""What the server says, as one sentence."""

import pytest
from piccard.triton_control import server_words

FRAMES = "\n\nAt:\n  /home/engine/weights.py(94): tensor\n  /home/engine/server_model.py(96): initialize\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version 3: CheckpointError: a tensor is missing", "version 3: CheckpointError: a tensor is missing"),
        (f"version 3: a tensor is missing{FRAMES};", "version 3: a tensor is missing"),
        (f"3: missing{FRAMES};4: truncated{FRAMES};", "3: missing;4: truncated"),
        ("3: missing\n\nAt:\n  weights.py(94): tensor", "3: missing"),
        ("Prices:\nAt: five", "Prices: At: five"),
        ("", ""),
    ],
)
def test_a_reason_is_told_without_frames(text: str, told: str) -> None:
    assert server_words(text) == told
