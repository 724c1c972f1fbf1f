"""What `piccard generate` prints."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from piccard_contract.request import GenerateRequest

from piccard.generate import generate, open_checkpoint, read_sampling
from piccard.installation import demo_checkpoint


def run(
    checkpoint: Path | None,
    prompt: str,
    *,
    chat: bool,
    sampling: dict[str, Any],
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Generate and print: the text as it comes, or one JSON object at the end."""
    messages = [{"role": "user", "content": prompt}] if chat else None
    request = GenerateRequest(
        id="generate", text=None if chat else prompt, messages=messages, sampling=read_sampling(sampling)
    )
    version = open_checkpoint(checkpoint or demo_checkpoint(), settings, _progress)
    started, texts, last = time.perf_counter(), [], None
    if not as_json and not chat:
        _write(prompt)
    for piece in generate(version, request):
        texts.append(piece.text)
        last = piece
        if not as_json:
            _write(piece.text)
    seconds = time.perf_counter() - started
    tokens = last.num_output_tokens if last else 0
    if as_json:
        told = {
            "text": "".join(texts),
            "finish_reason": last.finish_reason if last else None,
            "prompt_tokens": last.num_prompt_tokens if last else 0,
            "completion_tokens": tokens,
            "seconds": seconds,
        }
        print(json.dumps(told, ensure_ascii=False))
        return
    _write("\n")
    print(f"{tokens} tokens in {seconds:.2f} s, {tokens / max(seconds, 1e-9):.1f} a second", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _progress(share: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if share >= 1.0 else ""
        sys.stderr.write(f"\rloading {100 * share:3.0f} %{end}")
        sys.stderr.flush()
