"""The build of the CUDA library: binaries by what they are made of, and what goes wrong."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deepseek_engine.kernels.variants import ARCHITECTURES, HOPPER
from deepseek_ops.build import BuildError
from deepseek_ops.cuda.cubins import compile_images, image_sha256
from deepseek_ops.cuda.selection import Image, images, selected

ELF = b"\x7fELF"


def _image(name: str, dtype: str = "bf16") -> Image:
    kernels = [each for each in selected() if each.kernel.name == name]
    return next(image for image in images(kernels, (HOPPER,)) if image.dtype == dtype)


def test_a_binary_is_kept_by_what_it_is_made_of(tmp_path: Path) -> None:
    wanted = [_image("swiglu"), _image("swiglu", "fp16")]
    first, second = compile_images(wanted, tmp_path)
    assert (first.entry, first.content[:4]) == ("swiglu_kernel", ELF)
    assert first.content != second.content
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(image_sha256(image) for image in wanted)
    # What is kept is not compiled again.
    kept = tmp_path / image_sha256(wanted[0])
    kept.write_bytes(b'{"entry": "other", "shared_bytes": 7}\nkept')
    assert compile_images(wanted[:1], tmp_path)[0].content == b"kept"


def test_the_name_of_a_binary_is_the_same_in_every_process() -> None:
    """Python orders a set differently in each."""
    program = (
        "from deepseek_ops.cuda.cubins import image_sha256; from deepseek_ops.cuda.selection import images, selected;"
        "print([image_sha256(i) for i in images(selected(), (90,))][:40])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_a_kernel_that_does_not_compile_is_told_by_its_name(tmp_path: Path) -> None:
    image = _image("swiglu")
    broken = replace(image, row=replace(image.row, num_warps=3))
    with pytest.raises(BuildError, match=r"kernel image swiglu\.block1024\.bf16\.sm_90 does not compile: "):
        compile_images([broken], tmp_path)
    assert not list(tmp_path.iterdir())


def test_tells_what_to_install_where_there_is_no_triton(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from deepseek_ops.cuda.build import build_cuda, BuildError\n"
        "from pathlib import Path\n"
        f"try: build_cuda(Path({str(tmp_path)!r}))\n"
        "except BuildError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "the CUDA operators are compiled with the triton package; install it" in done.stdout


def test_every_kernel_has_an_image_for_every_architecture_and_dtype() -> None:
    for each in selected():
        for architecture in ARCHITECTURES:
            found = {image.dtype for image in images([each], (architecture,))}
            lacks = architecture != HOPPER and all(row.architectures == (HOPPER,) for row in each.rows)
            assert lacks == (architecture != HOPPER and "gluon" in each.kernel.entry)
            assert found == (set() if lacks else {"bf16", "fp16"} if each.kernel.is_typed else {"bf16"})
