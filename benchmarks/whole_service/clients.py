"""Greedy gRPC streams through the ensemble without a pause, in processes of their own, each response with its time."""

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient
from deepseek_engine.text.tokenizer import Tokenizer

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n\n\ndef walk(folder):\n",
    "class Stack:\n    def __init__(self):\n",
    "for line in open(path):\n    ",
    "The deepest point of the sea is",
    "def merge(left, right):\n    result = []\n",
    "import json\nimport re\n",
    "while True:\n    try:\n",
)
TIMEOUT = 60.0
"""Seconds without an answer after which a stream counts as lost."""


@dataclass(slots=True)
class Record:
    """One stream.

    Attributes:
        began: `time.monotonic()` when it was sent.
        answers: time and tokens of each response that brought any.
        version: that served it.
        finish: its finish_reason; empty where none came.
        error: why it ended otherwise than asked; empty where it is whole.
    """

    began: float
    answers: list[tuple[float, int]] = field(default_factory=list)
    version: int = 0
    finish: str = ""
    error: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_input_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.answers)


@dataclass(frozen=True, slots=True)
class Served:
    """One greedy answer: token ids of prompt and output."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients send.

    Attributes:
        address: host:port of gRPC.
        streams: at once, over all processes.
        prompt, tokens: tokens of each prompt, and of each answer.
        vocabulary: prompts are random ids below it, so that no two begin alike.
    """

    address: str
    streams: int
    prompt: int
    tokens: int
    vocabulary: int
    processes: int = 4


def served(checkpoint: Path, records: Sequence[Record]) -> list[Served]:
    """The answers to PROMPTS, each asked alone and then all at once.

    Raises:
        RuntimeError: the server counted other tokens of the prompts than there are.
    """
    tokenizer = Tokenizer.from_folder(checkpoint)
    prompts = 2 * [tokenizer.encode(text) for text in PROMPTS]
    lengths = [len(ids) for ids in prompts]
    if lengths != [record.num_input_tokens for record in records]:
        raise RuntimeError(f"prompts have {lengths} tokens, the server counted others")
    return [Served(ids, record.token_ids) for ids, record in zip(prompts, records, strict=True)]


class Clients:
    """The processes of a load; `stop` ends them after their last streams.

    Args:
        folder: where each process writes its streams, one JSON line each.
    """

    def __init__(self, load: Load, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._stopping = context.Event()
        count = min(load.processes, load.streams)
        shares = [load.streams // count + (place < load.streams % count) for place in range(count)]
        self._paths = [folder / f"streams-{place}.jsonl" for place in range(count)]
        self._processes = [
            context.Process(target=_client, args=(load, share, place, path, self._stopping))
            for place, (share, path) in enumerate(zip(shares, self._paths, strict=True))
        ]
        for process in self._processes:
            process.start()

    def wait_running(self, timeout: float = TIMEOUT) -> None:
        """Wait until each process has had a stream to its end.

        Raises:
            RuntimeError: one has not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not all(path.exists() and path.stat().st_size for path in self._paths):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no stream was over within {timeout:g} s")
            time.sleep(0.05)

    def stop(self, timeout: float = TIMEOUT + 10.0) -> list[Record]:
        """Let every stream end and return all.

        Raises:
            RuntimeError: a client process ended otherwise than in order.
        """
        self._stopping.set()
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        if any(codes) or None in codes:
            raise RuntimeError(f"the clients' processes ended with {codes}")
        return [_record(line) for path in self._paths for line in path.read_text().splitlines()]


def _record(line: str) -> Record:
    found = json.loads(line)
    return Record(**{**found, "answers": [(when, count) for when, count in found["answers"]]})


def _client(load: Load, streams: int, place: int, path: Path, stopping: Event) -> None:
    asyncio.run(_streams(load, streams, place, path, stopping))


async def _streams(load: Load, streams: int, place: int, path: Path, stopping: Event) -> None:
    client = grpcclient.InferenceServerClient(load.address)
    chance = random.Random(place)
    with path.open("w", buffering=1) as file:

        async def again() -> None:
            while not stopping.is_set():
                ids = [chance.randrange(3, load.vocabulary) for _ in range(load.prompt)]
                record = await ask(client, prompt_ids(ids), load.tokens)
                record.token_ids.clear()
                file.write(json.dumps(asdict(record)) + "\n")
                if record.error:
                    # What fails at once is not asked for a thousand times a second.
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(again() for _ in range(streams)))
    await client.close()


def prompt_ids(ids: Sequence[int]) -> grpcclient.InferInput:
    """A prompt of token ids."""
    tensor = grpcclient.InferInput("input_ids", [len(ids)], "INT64")
    tensor.set_data_from_numpy(np.array(ids, dtype=np.int64))
    return tensor


def prompt_text(text: str) -> grpcclient.InferInput:
    """A prompt of text."""
    return _bytes("text_input", text)


def _bytes(name: str, value: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=object))
    return tensor


def _flag(name: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([True]))
    return tensor


async def ask(
    client: grpcclient.InferenceServerClient,
    prompt: grpcclient.InferInput,
    tokens: int,
    model: str = "deepseek",
    *,
    version: int | None = None,
) -> Record:
    """One greedy stream of exactly `tokens` tokens; what goes wrong is told in the record.

    Args:
        version: that has to serve it; else the policy decides.
    """
    sampling = json.dumps({"temperature": 0, "max_tokens": tokens, "ignore_eos": True})
    inputs = [prompt, _bytes("sampling_parameters", sampling), _flag("stream")]
    inputs += [_flag("return_finish_reason"), _flag("return_num_input_tokens")]
    record = Record(time.monotonic())
    try:
        async with asyncio.timeout(TIMEOUT):
            pin = {} if version is None else {"parameters": {"version": version}}
            await _read(client, {"model_name": model, "inputs": inputs, **pin}, record)
    # A stream that fails is a finding, whatever it fails of.
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
    else:
        record.error = _incomplete(record, tokens)
    return record


def _incomplete(record: Record, tokens: int) -> str:
    if record.tokens != tokens:
        return f"{record.tokens} tokens came, {tokens} were asked for"
    return "" if record.finish == "length" else f"it ended with {record.finish or 'no reason'}"


async def _read(client: grpcclient.InferenceServerClient, request: dict[str, Any], record: Record) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield request

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        ids = result.as_numpy("token_ids")
        if ids is not None and ids.size:
            record.answers.append((time.monotonic(), int(ids.size)))
            record.token_ids += ids.tolist()
            if not record.version:
                record.version = int(result.as_numpy("served_version")[0])
                record.num_input_tokens = int(result.as_numpy("num_input_tokens").flat[0])
        if (finish := result.as_numpy("finish_reason")) is not None and finish.size and finish.flat[0]:
            record.finish = finish.flat[0].decode()
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
