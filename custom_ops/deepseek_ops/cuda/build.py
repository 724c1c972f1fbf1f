"""Builds the library with the CUDA kernels. No GPU is needed: they are compiled ahead of time and embedded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepseek_engine.kernels.variants import ARCHITECTURES

from deepseek_ops.build import BuildError, Recipe, build_recipe, default_folder, sources_in
from deepseek_ops.header import FILE_NAME, operators_header
from deepseek_ops.registry import CUDA

if TYPE_CHECKING:
    from deepseek_ops.cuda.cubins import Cubin
    from deepseek_ops.cuda.selection import Image

NAME = "deepseek_ops-cuda"
FLAGS = ("-std=c++20",)
_IMAGES = "images.generated"


def build_cuda(
    folder: Path | None = None,
    *,
    architectures: Sequence[int] = ARCHITECTURES,
    extra_flags: Sequence[str] = (),
    compile_images: "Callable[[Sequence[Image], Path], list[Cubin]] | None" = None,
) -> Path:
    """The library of the current sources and kernels, built unless it is there already.

    Args:
        compile_images: what makes the images' binaries, in a folder that keeps them; Triton by default. The name of
            the library does not know of it: give a flag too.

    Raises:
        BuildError: no triton, no compiler, or one failed.
    """
    try:
        from deepseek_ops.cuda import cubins, manifest, selection, tables
    except ImportError as error:
        raise BuildError(
            f"{error}: the CUDA operators are compiled with the triton package; install it (pip install triton==3.6.0)"
        ) from None
    kernels = selection.selected()
    images = list(selection.images(kernels, tuple(architectures)))
    sources = {
        **sources_in("shared", "cuda"),
        FILE_NAME: operators_header(CUDA),
        tables.HEADER_NAME: tables.tables_header(kernels),
        tables.SOURCE_NAME: tables.tables_source(kernels, images),
        manifest.FILE_NAME: manifest.manifest_source(manifest.manifest(images)),
    }
    recipe = Recipe(sources, (*FLAGS, *extra_flags), name=NAME)
    compiler = compile_images or cubins.compile_images
    prepare = partial(_embed, compiler, images, default_folder() / "cubins")
    return build_recipe(replace(recipe, prepare=prepare), folder)


def _embed(
    compile_images: "Callable[[Sequence[Image], Path], list[Cubin]]", images: "Sequence[Image]", cache: Path, work: Path
) -> list[str]:
    """Write the binaries, and the sources that name them; returns these sources' names."""
    found = compile_images(images, cache)
    lines = ["  .section .rodata"]
    rows = []
    for index, cubin in enumerate(found):
        (work / f"{index}.cubin").write_bytes(cubin.content)
        lines += ["  .balign 64", f"  .globl piccard_image_{index}", f"  .hidden piccard_image_{index}"]
        lines += [f"piccard_image_{index}:", f'  .incbin "{index}.cubin"']
        rows.append(f'    {{piccard_image_{index}, "{cubin.entry}", {cubin.shared_bytes}u}}')
    (work / f"{_IMAGES}.S").write_text("\n".join((*lines, '  .section .note.GNU-stack,"",%progbits', "")))
    declared = "\n".join(f"extern const unsigned char piccard_image_{index}[];" for index in range(len(found)))
    body = ",\n".join(rows)
    (work / f"{_IMAGES}.table.cc").write_text(
        f'#include "kernel.h"\n\nextern "C" {{\n{declared}\n}}\n\nnamespace piccard {{\n\n'
        f"const Image kImages[] = {{\n{body}\n}};\nconst int kImageCount = {len(found)};\n\n}}  // namespace piccard\n"
    )
    return [f"{_IMAGES}.S", f"{_IMAGES}.table.cc"]
