"""A generator with knobs, and a gateway over it in this process."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from piccard_contract.errors import RequestError
from piccard_contract.home import Service
from piccard_contract.lifecycle import ServiceState
from piccard_contract.response import Choice, Response, Usage
from piccard_gateway.app import make_app
from piccard_gateway.catalogue import Catalogue
from piccard_gateway.deadlines import FirstTokenDeadlines, TimedGenerator
from piccard_gateway.fill_in_middle import GapTokens
from piccard_gateway.gateway import Gateway
from piccard_gateway.generator import Generation
from piccard_gateway.key_ring import KeyRing
from piccard_gateway.settings_file import SettingsFile

SECRET = b"of this start"


def logprob(token: str, value: float, rank: int) -> dict[str, Any]:
    return {"logprob": value, "rank": rank, "decoded_token": token}


@dataclass
class FakeGenerator:
    """Says `words`, one a response.

    Attributes:
        fail: raised after `fail_after` words.
        hang: whether nothing comes after the words.
        reasoning: what is told apart before the first word.
        asked: generations so far.
        closed: how many were left before their end.
    """

    words: list[str] = field(default_factory=lambda: ["Hello", " world"])
    fail: RequestError | None = None
    fail_after: int = 0
    hang: bool = False
    reasoning: str = ""
    asked: list[Generation] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    alive: bool = True

    async def generate(self, asked: Generation) -> AsyncGenerator[Response, None]:
        self.asked.append(asked)
        count = int(asked.sampling.get("n", 1))
        over = False
        try:
            yield Response(
                [Choice() for _ in range(count)], served_version=2, route_reason="header", cancel_token="2.a"
            )
            if self.reasoning:
                yield Response([Choice(reasoning=self.reasoning) for _ in range(count)])
            for number, word in enumerate(self.words):
                if self.fail is not None and number == self.fail_after:
                    over = True
                    raise self.fail
                yield Response([self._choice(word, number, asked) for _ in range(count)], **self._prompt(asked, number))
            if self.hang:
                await asyncio.Event().wait()
            over = True
            yield Response(
                [Choice(finish_reason="length") for _ in range(count)], usage=Usage(3, len(self.words) * count, 1)
            )
        finally:
            if not over:
                self.closed.set()

    async def live(self) -> bool:
        return self.alive

    def _choice(self, word: str, number: int, asked: Generation) -> Choice:
        position = {"7": logprob(word, -0.5, 2), "8": logprob("other", -0.1, 1)}
        return Choice(text=word, token_ids=[number], logprobs=[position] if asked.wants_logprobs else None)

    def _prompt(self, asked: Generation, number: int) -> dict[str, Any]:
        if number or "prompt_logprobs" not in asked.sampling:
            return {}
        return {"prompt_logprobs": [None, {"5": logprob(" b", -1.5, 1)}]}


@dataclass
class FakeGateway:
    """The application over a fake generator, in a home with one service."""

    generator: FakeGenerator
    service: Service
    app: Any
    deadlines: FirstTokenDeadlines

    @asynccontextmanager
    async def client(self, headers: Mapping[str, str] = {}) -> AsyncGenerator[httpx.AsyncClient, None]:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
            yield client

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """One request to the end; names of headers have _ for -."""

        async def send() -> httpx.Response:
            async with self.client({name.replace("_", "-"): value for name, value in headers.items()}) as client:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                return await client.post(path, content=content)

        return asyncio.run(send())

    def get(self, path: str, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            async with self.client(headers) as client:
                return await client.get(path)

        return asyncio.run(send())


def make_gateway(home: Path, generator: FakeGenerator) -> FakeGateway:
    """A gateway over `generator`, of a home with a service `deepseek` whose versions 1 and 2 serve."""
    service = Service(home)
    service.state_folder.mkdir(parents=True)
    service.keys_folder.mkdir()
    state = ServiceState(service="deepseek", stable=1, canary=2)
    service.state_json.write_text(state.model_dump_json(by_alias=True))
    settings = SettingsFile(service.gateway_file)
    deadlines = FirstTokenDeadlines(lambda: settings.current().deadlines)
    gateway = Gateway(TimedGenerator(generator, deadlines), Catalogue(home), settings, deadlines, GapTokens(), SECRET)
    return FakeGateway(generator, service, make_app(gateway, KeyRing(service.gateway_keys)), deadlines)


def events(answer: httpx.Response) -> list[Any]:
    """The JSON objects of a stream's events; the word DONE as text."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
