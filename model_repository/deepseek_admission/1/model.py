"""Admission: reads, validates and completes a request once."""

from piccard_canary.server_model import AdmissionModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
