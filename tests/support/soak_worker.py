"""Sends the soak's requests over gRPC for Locust, whose greenlets and gRPC's threads do not go together in a process.

python soak_worker.py SOCKET GRPC GATEWAY: each connection to the socket is a client. A line `NAME NUMBER` sends a
request of `soak_requests`; the answer is a line of JSON, [outcome, fault or null].
"""

import json
import sys
from socketserver import StreamRequestHandler, ThreadingMixIn, UnixStreamServer

from soak_requests import SoakClient, outcome_of


class Worker(ThreadingMixIn, UnixStreamServer):
    """Listens on a socket of the file system.

    Args:
        path: of the socket.
        grpc, gateway: host:port.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, path: str, grpc: str, gateway: str) -> None:
        super().__init__(path, _Client)
        self.addresses = grpc, gateway


class _Client(StreamRequestHandler):
    server: Worker

    def handle(self) -> None:
        client = SoakClient(*self.server.addresses)
        for line in self.rfile:
            name, number = line.decode().split()
            self.wfile.write(json.dumps(outcome_of(client, name, int(number))).encode() + b"\n")
        client.close()


if __name__ == "__main__":
    Worker(*sys.argv[1:4]).serve_forever()
