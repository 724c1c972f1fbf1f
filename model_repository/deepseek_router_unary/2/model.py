"""The router: chooses a request's version and sends its answer on."""

from piccard_canary.server_model import RouterModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
