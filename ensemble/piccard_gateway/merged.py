"""The responses of several generations of one request, as they come."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from piccard_contract.response import Response

Source = AsyncGenerator[Response, None]
Numbered = AsyncGenerator[tuple[int, Response], None]


async def merged(sources: list[Source]) -> Numbered:
    """Yields (number of the source, response). The first failure ends all, and so does closing this.

    Raises:
        RequestError: of the source that failed.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for response in source:
                yield 0, response
        return
    queue: asyncio.Queue[tuple[int, Response | Exception | None]] = asyncio.Queue(maxsize=len(sources))
    pumps = [asyncio.create_task(_pump(number, source, queue)) for number, source in enumerate(sources)]
    left = len(pumps)
    try:
        while left:
            number, what = await queue.get()
            if isinstance(what, Exception):
                raise what
            if what is None:
                left -= 1
            else:
                yield number, what
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, source: Source, queue: "asyncio.Queue[tuple[int, Response | Exception | None]]") -> None:
    try:
        async with aclosing(source):
            async for response in source:
                await queue.put((number, response))
    except Exception as error:
        await queue.put((number, error))
    else:
        await queue.put((number, None))
