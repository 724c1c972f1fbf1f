"""/livez and /readyz of the supervisor, as Triton's own health answers 200 for a model whose process is dead."""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Health = tuple[bool, dict[str, Any]]
Question = Callable[[], Health]

SERVICE_PATH = "/readyz/"

# Connections at once, and seconds that one may take to send its request. Whoever comes when there are more takes the
# place of the oldest, so that none who only holds the line keeps a probe out.
MOST_CONNECTIONS = 128
REQUEST_SECONDS = 10.0


class HealthServer:
    """Answers GET /livez, /readyz and /readyz/SERVICE with 200 or 503 and a JSON body; 404 for what there is not.

    Args:
        host, port: where it listens.
        live: whether the server's process runs.
        ready: whether stable of every service generates a token in time; asked at most once in `keep` seconds.
        ready_of: the same question for the service of a name, None where there is none; each asked as seldom.
    """

    def __init__(
        self,
        host: str,
        port: int,
        live: Question,
        ready: Question,
        ready_of: Callable[[str], Question | None],
        keep: float = 1.0,
    ) -> None:
        answers: dict[str, Question] = {"/livez": live, "/readyz": _Cached(ready, keep)}
        services = _CachedByName(ready_of, keep)

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_SECONDS

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                named = path.startswith(SERVICE_PATH)
                answer = services.find(path.removeprefix(SERVICE_PATH)) if named else answers.get(path)
                if answer is None:
                    known = "there is no such service" if named else "there are /livez, /readyz and /readyz/SERVICE"
                    self._send(404, {"error": known})
                    return
                good, body = answer()
                self._send(200 if good else 503, body)

            def _send(self, status: int, body: dict[str, Any]) -> None:
                payload = json.dumps(body).encode() + b"\n"
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                # Probes come every few seconds; they are no news.
                pass

        self._server = _Server((host, port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        # A server that never served would be waited for without end.
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= MOST_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
            self._open[request] = None
        if oldest is not None:
            with suppress(OSError):
                # Its thread reads the end, and closes it.
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A prober that hangs up early is no news either.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Cached:
    """One answer for all who ask within `keep` seconds, so that probes cannot load the server."""

    def __init__(self, ask: Question, keep: float) -> None:
        self._ask = ask
        self._keep = keep
        self._lock = threading.Lock()
        self._answer: Health = (False, {})
        self._time = float("-inf")

    def __call__(self) -> Health:
        with self._lock:
            if time.monotonic() - self._time > self._keep:
                self._answer = self._ask()
                self._time = time.monotonic()
            return self._answer


class _CachedByName:
    """One cached answer for each service that there is; names that nobody has leave nothing behind."""

    def __init__(self, question: Callable[[str], Question | None], keep: float) -> None:
        self._question = question
        self._keep = keep
        self._lock = threading.Lock()
        self._answers: dict[str, _Cached] = {}

    def find(self, name: str) -> Question | None:
        ask = self._question(name)
        if ask is None:
            return None
        with self._lock:
            return self._answers.setdefault(name, _Cached(ask, self._keep))
