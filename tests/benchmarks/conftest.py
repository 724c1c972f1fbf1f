"""Puts benchmarks/ on the path, after all else: its scripts have names that others could have too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
