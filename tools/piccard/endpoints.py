"""What `piccard serve` prints once stable answers."""

ENDPOINTS = """
{service}: stable is version {stable}, and it answers
  gRPC     {grpc}
  HTTP     http://{http}
  metrics  http://{metrics}/metrics
  health   http://{health}/readyz

  curl -sN http://{http}/v2/models/{service}/generate_stream \\
    -d '{{"text_input": "def fibonacci(n):", "stream": true, "max_tokens": 64, "temperature": 0}}'

  python -c '
import numpy, tritonclient.http as triton
text = triton.InferInput("text_input", [1], "BYTES")
text.set_data_from_numpy(numpy.array(["def fibonacci(n):"], dtype=object))
answer = triton.InferenceServerClient("{http}").infer("{service}_unary", [text])
print(answer.as_numpy("text_output")[0].decode())'
"""


def endpoints(service: str, stable: int, *, http: str, grpc: str, metrics: str, health: str) -> str:
    """Endpoints of a service as host:port, and calls to copy."""
    return ENDPOINTS.format(service=service, stable=stable, http=http, grpc=grpc, metrics=metrics, health=health)
