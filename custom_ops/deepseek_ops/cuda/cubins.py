"""Compiles rows ahead of time, several at once, and keeps the binaries by what they are made of."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from deepseek_ops.build import BuildError
from deepseek_ops.cuda.selection import Image


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled image.

    Attributes:
        content: the binary for one architecture.
        entry: the function's symbol.
        shared_bytes: dynamic shared memory a block.
    """

    content: bytes
    entry: str
    shared_bytes: int


def image_sha256(image: Image) -> str:
    """Over what decides the binary: the kernel's source with all that it calls, its constants, types and divisibility,
    the compiler's options and version."""
    import triton
    from deepseek_engine.kernels.launcher import options, source

    made_of = (
        triton.__version__,
        source(image.kernel, image.row, image.dtype, image.architecture).hash(),
        str(image.architecture),
        json.dumps(options(image.kernel, image.row, image.architecture), sort_keys=True),
    )
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()


def compile_images(images: Sequence[Image], folder: Path) -> list[Cubin]:
    """The images' binaries in order, from `folder` where they are there already.

    Raises:
        BuildError: what the compiler says of the first image that it does not take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / image_sha256(image) for image in images]
    missing = [(image, path) for image, path in zip(images, paths, strict=True) if not path.is_file()]
    if missing:
        count = min(len(missing), len(os.sched_getaffinity(0)))
        # Each compiles on its own: forked ones would share what the parent's compiler holds.
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, *zip(*missing, strict=True)))
    return [_read(path) for path in paths]


def _compile(image: Image, path: Path) -> None:
    try:
        _compile_to(image, path)
    except Exception as error:
        raise BuildError(f"kernel image {image.name} does not compile: {str(error)[-2000:]}") from None


def _compile_to(image: Image, path: Path) -> None:
    import triton
    from deepseek_engine.kernels.aot import WARP_SIZE
    from deepseek_engine.kernels.launcher import options, source
    from triton.backends.compiler import GPUTarget

    # Lines of source are half of a binary, and nothing of what it does: they are no part of what it is made of.
    triton.knobs.compilation.disable_line_info = True
    compiled = triton.compile(
        source(image.kernel, image.row, image.dtype, image.architecture),
        target=GPUTarget("cuda", image.architecture, WARP_SIZE),
        options=options(image.kernel, image.row, image.architecture),
    )
    metadata = compiled.metadata
    if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
        raise ValueError("it needs scratch memory or clusters, which the launcher does not give")
    header = json.dumps({"entry": metadata.name, "shared_bytes": metadata.shared}).encode()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
        file.write(header + b"\n" + compiled.asm["cubin"])
    # Whoever finds the name finds a whole binary.
    Path(file.name).rename(path)


def _read(path: Path) -> Cubin:
    header, _, content = path.read_bytes().partition(b"\n")
    said = json.loads(header)
    return Cubin(content, said["entry"], said["shared_bytes"])
