"""A streamed request that runs in the background of a test."""

import json
import threading
from typing import Any

from triton_calls import GrpcStream, Outputs


class RunningStream:
    """One request on a gRPC stream of its own, running since it was made.

    Args:
        address: host:port.
        model: its name; `version` calls one version of it.
        options: of `GrpcStream.send`, the inputs included.

    Attributes:
        responses: what came so far.
        error: what ended it, or None.
    """

    def __init__(
        self, address: str, model: str, *, headers: dict[str, str] | None = None, timeout: float = 120.0, **options: Any
    ) -> None:
        self.responses: list[Outputs] = []
        self.error: Exception | None = None
        self._first = threading.Event()
        self._timeout = timeout
        self._thread = threading.Thread(target=self._run, args=(address, model, headers, options), daemon=True)
        self._thread.start()

    def wait_first(self, timeout: float = 60.0) -> "RunningStream":
        """Wait until its first response came."""
        assert self._first.wait(timeout), f"no response within {timeout} s"
        assert self.error is None, self.error
        return self

    def wait(self) -> "RunningStream":
        """Wait until it is over."""
        self._thread.join(self._timeout)
        assert not self._thread.is_alive(), f"not over after {self._timeout} s, {len(self.responses)} responses came"
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0] for response in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [token for response in self.responses for token in response["token_ids"]]

    @property
    def versions(self) -> set[int]:
        """The versions that served it."""
        return {response["served_version"][0] for response in self.responses}

    @property
    def status(self) -> str | None:
        """The code of its last response, or None where it ended without one."""
        statuses = [response["status"][0] for response in self.responses if "status" in response]
        return json.loads(statuses[-1])["code"] if statuses else None

    def _run(self, address: str, model: str, headers: dict[str, str] | None, options: dict[str, Any]) -> None:
        try:
            with GrpcStream(address, headers) as stream:
                stream.send(model, stream=True, **options)
                for response in stream.responses(self._timeout):
                    self.responses.append(response)
                    self._first.set()
        # Whatever ends it is what the test looks at.
        except Exception as error:
            self.error = error
        finally:
            self._first.set()
