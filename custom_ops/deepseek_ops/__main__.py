"""`python -m deepseek_ops`: build the library if need be and print its path."""

import argparse
import sys
from pathlib import Path

from deepseek_engine.kernels.variants import ARCHITECTURES

from deepseek_ops.build import BuildError, build
from deepseek_ops.cuda.build import build_cuda


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deepseek_ops", description="Build the com.deepseek operators.")
    parser.add_argument("--folder", type=Path, help="where to keep the library; else the user's cache folder")
    parser.add_argument("--cuda", action="store_true", help="with the kernels for GPUs; needs triton, but no GPU")
    parser.add_argument(
        "--architectures",
        type=int,
        nargs="+",
        choices=ARCHITECTURES,
        default=ARCHITECTURES,
        help="with --cuda: compute capabilities that kernels are compiled for; one takes a third of the time",
    )
    given = parser.parse_args()
    try:
        print(build_cuda(given.folder, architectures=given.architectures) if given.cuda else build(given.folder))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
