"""The C++ tables choose the rows and compute the grids and scratch sizes that the Python ones do."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepseek_engine.kernels.variants import ARCHITECTURES, DTYPES, nearest_architecture
from deepseek_ops.build import SOURCES, find_compiler
from deepseek_ops.cuda.manifest import manifest, stale_images
from deepseek_ops.cuda.selection import Image, Selected, images, selected
from deepseek_ops.cuda.tables import HEADER_NAME, SOURCE_NAME, tables_header, tables_source
from deepseek_ops.formula import names_in
from hypothesis import given, settings
from hypothesis import strategies as st

KERNELS = selected()
PLANS = list({each.plan.operator: each.plan for each in KERNELS if each.plan.workspaces}.values())


class Program:
    """The tables behind a pipe: a question a line, an answer a line."""

    def __init__(self, folder: Path) -> None:
        (folder / HEADER_NAME).write_text(tables_header(KERNELS))
        (folder / SOURCE_NAME).write_text(tables_source(KERNELS, []))
        (folder / "main.cc").write_text(_main())
        flags = [
            "-std=c++20",
            "-O0",
            "-Wall",
            "-Werror",
            *(f"-I{SOURCES / part}" for part in ("shared", "cuda")),
            "-I.",
        ]
        command = [find_compiler(), *flags, "main.cc", SOURCE_NAME, "-o", "program"]
        subprocess.run(command, cwd=folder, check=True)
        self.process = subprocess.Popen([folder / "program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *numbers: int) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, numbers)) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()


def _main() -> str:
    tables = ", ".join(f"&kernels::{each.kernel.name}::kernel" for each in KERNELS)
    asked = []
    for index, plan in enumerate(PLANS):
        names = _names(index)
        reads = "".join(f"      std::cin >> w.{name};\n" for name in names)
        writes = ' << " " << '.join(f"w.{name}_bytes()" for name in plan.workspaces)
        asked.append(f"    if (what == {-1 - index}) {{\n      kernels::{plan.operator}_workspace w;\n{reads}")
        asked.append(f"      std::cout << {writes} << std::endl;\n      continue;\n    }}\n")
    return f"""#include <iostream>
#include "{HEADER_NAME}"
using namespace piccard;
const Kernel* const kTables[] = {{{tables}}};
int main() {{
  int what;
  while (std::cin >> what) {{
{"".join(asked)}
    const Kernel& kernel = *kTables[what];
    int capability, dtype;
    std::cin >> capability >> dtype;
    int64_t dims[32], blocks[3];
    for (int i = 0; i < kernel.dim_count; ++i) std::cin >> dims[i];
    const int architecture = nearest_architecture(capability);
    const Row* row = architecture < 0 ? nullptr : kernel.choose(architecture, dtype, dims);
    if (row == nullptr) {{
      std::cout << "-" << std::endl;
      continue;
    }}
    kernel.grid(dims, row->constants, blocks);
    std::cout << row->name << " " << row->warps << " " << row->blocks_per_multiprocessor;
    for (const int64_t each : blocks) std::cout << " " << each;
    std::cout << std::endl;
  }}
}}
"""


def _names(plan: int) -> list[str]:
    return sorted({name for formula in PLANS[plan].workspaces.values() for name in names_in(formula)})


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    made = Program(tmp_path_factory.mktemp("tables"))
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    assert made.process.wait(60) == 0


def _values(each: Selected, name: str) -> st.SearchStrategy[int]:
    """Around the ends of the rows' ranges, where a wrong comparison shows, and anywhere."""
    ends = [end for row in each.rows if name in row.when for end in row.when[name]]
    near = [value for end in ends for value in (end - 1, end, end + 1) if 0 <= value < 2**40]
    return st.one_of(st.sampled_from([1, *near]), st.integers(1, 5000))


@st.composite
def _questions(draw: st.DrawFn) -> tuple[int, int, int, dict[str, int]]:
    index = draw(st.integers(0, len(KERNELS) - 1))
    capability = draw(st.sampled_from([75, 80, 86, 89, 90, 100]))
    dims = {name: draw(_values(KERNELS[index], name)) for name in KERNELS[index].dimensions}
    return index, capability, draw(st.integers(0, 1)), dims


@settings(max_examples=600)
@given(question=_questions())
def test_rows_and_grids_are_those_of_python(program: Program, question: tuple[int, int, int, dict[str, int]]) -> None:
    index, capability, dtype, dims = question
    each = KERNELS[index]
    row = each.table.choose(capability, DTYPES[dtype], dims)
    answer = program.ask(index, capability, dtype, *dims.values())
    if row is None:
        assert answer == ["-"]
        return
    blocks = each.step.blocks(dims, row)
    assert answer == [row.name, *map(str, (row.num_warps, row.blocks_per_multiprocessor, *blocks))]


def test_a_dimension_that_is_not_given_fits_no_range(program: Program) -> None:
    index = next(i for i, each in enumerate(KERNELS) if each.kernel.name == "rms_norm")
    assert program.ask(index, 90, 0, 3, -1) == ["-"]


@given(plan=st.integers(0, len(PLANS) - 1), data=st.data())
def test_scratch_sizes_are_those_of_python(program: Program, plan: int, data: st.DataObject) -> None:
    values = {name: data.draw(st.integers(1, 3000), name) for name in _names(plan)}
    sizes = PLANS[plan].workspace_bytes(values)
    assert program.ask(-1 - plan, *values.values()) == [str(size) for size in sizes.values()]


def test_architectures_stand_in_the_order_of_the_tables(program: Program) -> None:
    """An image's place is found by it."""
    text = (SOURCES / "cuda" / "kernel.h").read_text()
    assert f"kArchitectures[] = {{{', '.join(map(str, ARCHITECTURES))}}}" in text
    assert [nearest_architecture(each) for each in (80, 86, 89, 90)] == [80, 80, 89, 90]


def test_a_library_is_stale_once_a_kernel_or_its_row_changes(
    named_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is embedded tells what it is of: no kernel can be newer without being told."""
    wanted = list(images(KERNELS, ARCHITECTURES))
    assert stale_images(named_library, wanted) == []
    changed = wanted[3]
    row = type(changed.row)(
        **{
            **{name: getattr(changed.row, name) for name in changed.row.__slots__},
            "num_warps": changed.row.num_warps * 2,
        }
    )
    other = Image(changed.kernel, row, changed.dtype, changed.architecture)
    assert stale_images(named_library, [other, *wanted[4:]]) == [changed.name]
    from deepseek_engine.kernels.chaining import follow

    before = manifest(wanted[:1])
    # Every chained kernel calls it: its source is part of theirs.
    monkeypatch.setattr(follow, "hash", None)
    monkeypatch.setattr(follow, "_src", follow.src.replace("gdc_wait()", "gdc_wait()  # changed"))
    _forget(wanted[0])
    assert manifest(wanted[:1]) != before
    monkeypatch.undo()
    _forget(wanted[0])
    assert manifest(wanted[:1]) == before


def _forget(image: Image) -> None:
    """Triton keeps what it found of a function's source."""
    from deepseek_engine.kernels.launcher import entry

    entry(image.kernel.entry).hash = None
