"""A version of the model: runs the engine of its own folder code/ where there is one, else the installed engine."""

import sys
from pathlib import Path

_code = Path(__file__).parent / "code"
if _code.is_dir():
    sys.path.insert(0, str(_code))

from deepseek_engine.server_model import VersionModel as TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
