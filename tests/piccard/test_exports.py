"""Versions with runner onnxruntime in a home: what publish, init, doctor and retire do with exports and libraries."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from operations import operation_of
from piccard.doctor import findings
from piccard.exports import remove_unused, unused
from piccard.home_init import init_home, shipped_versions
from piccard.snapshot import export_hash, library_hash
from piccard_contract.home import Service
from piccard_contract.version_file import Runner, VersionFile, read_version_file

Piccard = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture
def publish(service: Service, piccard: Piccard, checkpoint: Path) -> Callable[..., VersionFile]:
    """Publishes with runner onnxruntime; returns the newest version's file."""

    def run(*options: str) -> VersionFile:
        piccard(service.home, "publish", str(checkpoint), "--runner=onnxruntime", *options)
        newest = max(int(path.name) for path in service.llm_folder.glob("[0-9]*"))
        return read_version_file(service.version_folder(newest))

    return run


def named(service: Service, version: VersionFile) -> tuple[Path, Path]:
    """Export and library of a version."""
    assert version.export
    assert version.ops_library
    return service.home / version.export, service.home / version.ops_library


def test_export_and_library_are_kept_under_their_hashes(
    service: Service, publish: Callable[..., VersionFile], library: Path
) -> None:
    version = publish()
    export, kept = named(service, version)
    assert (version.export, version.ops_library) == (f"exports/{export.name}", f"exports/{kept.name}")
    assert version.hashes.export == export.name == export_hash(export)
    assert version.hashes.ops_library == kept.stem == library_hash(library)
    assert sorted(path.name for path in service.exports.iterdir()) == sorted([export.name, kept.name])
    assert unused(service.home) == []


def test_what_has_a_hash_for_a_name_is_on_disk_before(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that says what a file holds is never looked behind again, so a power cut must not leave it without."""
    synced: set[int] = set()
    before: dict[str, set[int]] = {}
    sync, rename = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_name(made: str | Path, name: str | Path) -> None:
        if Path(name).parent.name == "exports":
            before[Path(name).name] = set(synced)
        rename(made, name)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_name)
    init_home(tmp_path / "home", shipped_versions(str(checkpoint)))
    service = Service(tmp_path / "home")
    kept = named(service, read_version_file(service.version_folder(2)))
    for path in (*kept, *kept[0].iterdir()):
        name = path.relative_to(service.exports).parts[0]
        assert path.stat().st_ino in before[name], path


def test_the_same_is_published_once(service: Service, publish: Callable[..., VersionFile]) -> None:
    first, again = publish(), publish()
    assert first == again
    assert len(list(service.exports.iterdir())) == 2
    other = publish("--profile=latency", "--label=v9")
    assert (other.export, other.ops_library) == (first.export, first.ops_library)
    assert len(list(service.exports.iterdir())) == 2


def test_an_int4_export_is_another_and_smaller(service: Service, publish: Callable[..., VersionFile]) -> None:
    whole, _ = named(service, publish())
    packed, _ = named(service, publish("--quantize=int4"))
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (whole, packed)]
    assert packed != whole
    assert sizes[1] < sizes[0]


def test_an_int4_export_for_a_gpu_is_packed(
    service: Service, publish: Callable[..., VersionFile], tmp_path: Path
) -> None:
    import onnx

    own = tmp_path / "cuda.so"
    own.write_bytes(b"for a GPU")
    export, _ = named(service, publish("--device=cuda", "--quantize=int4", f"--ops-library={own}"))
    graph = onnx.load(export / "model.onnx", load_external_data=False).graph
    assert {"DeepSeekMatMulInt4", "DeepSeekMoEInt4", "DeepSeekMLASchedule"} <= {node.op_type for node in graph.node}


def test_for_a_gpu_another_export_and_library_are_kept(
    service: Service, publish: Callable[..., VersionFile], tmp_path: Path
) -> None:
    import onnx

    own = tmp_path / "cuda.so"
    own.write_bytes(b"for a GPU")
    version = publish("--device=cuda", f"--ops-library={own}")
    export, kept = named(service, version)
    assert kept.read_bytes() == b"for a GPU"
    graph = onnx.load(export / "model.onnx", load_external_data=False).graph
    kinds = {each.name: each.type.tensor_type.elem_type for each in graph.input}
    assert kinds["latent_0"] == onnx.TensorProto.BFLOAT16
    assert kinds["host_batch"] == onnx.TensorProto.INT32


def test_a_dry_run_exports_nothing(service: Service, piccard: Piccard, checkpoint: Path) -> None:
    piccard(service.home, "publish", str(checkpoint), "--runner=onnxruntime", "--dry-run")
    assert not service.exports.exists()


def test_a_library_of_ones_own_is_copied(service: Service, piccard: Piccard, checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.so"
    own.write_bytes(b"mine")
    piccard(service.home, "publish", str(checkpoint), "--runner=onnxruntime", f"--ops-library={own}")
    _, kept = named(service, read_version_file(service.version_folder(3)))
    own.write_bytes(b"built again")
    assert kept.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--runner=onnxruntime", "--ops-library=/nowhere/ops.so"], "--ops-library /nowhere/ops.so is no file"),
        (["--runner=torch", "--ops-library=/nowhere/ops.so"], "--ops-library is for --runner onnxruntime"),
        (["--runner=torch", "--quantize=int4"], "--quantize is for --runner onnxruntime"),
        (["--runner=onnxruntime", "--label=v1.0.0"], "label v1.0.0 is that of version 1"),
        (
            ["--runner=onnxruntime", "--device=cuda", "--precision=float32"],
            "runner onnxruntime computes in bfloat16 or float16 on a GPU; publish with --precision auto",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    service: Service, piccard: Piccard, checkpoint: Path, options: list[str], told: str
) -> None:
    result = piccard(service.home, "publish", str(checkpoint), *options, check=False)
    assert result.returncode in (1, 2)
    assert told in result.stderr
    assert not service.exports.exists() or not list(service.exports.iterdir())


def test_a_killed_publication_leaves_no_name_of_a_hash(
    service: Service, publish: Callable[..., VersionFile], checkpoint: Path
) -> None:
    command = [sys.executable, "-m", "piccard", "publish", str(checkpoint), "--runner=onnxruntime"]
    command.append(f"--home={service.home}")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        assert any("exporting layer_001" in line for line in process.stderr)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    left = {path.name for path in service.exports.iterdir() if path.name.startswith(".")}
    assert left
    for path in service.exports.iterdir():
        assert path.name in left or path.stem == library_hash(path)
    found = next(each for each in findings(operation_of(service)) if each.trap == "export")
    assert found.repair
    found.repair()
    assert not list(service.exports.iterdir())
    export, kept = named(service, publish())
    assert sorted(service.exports.iterdir()) == sorted([export, kept])
    assert export.name == export_hash(export)


def test_what_no_version_names_is_found_and_removed(service: Service, publish: Callable[..., VersionFile]) -> None:
    version = publish()
    (service.exports / "0" / "part").mkdir(parents=True)
    found = next(each for each in findings(operation_of(service)) if each.trap == "export")
    assert "exports/0 is used by no version" in found.problem
    assert found.repair
    found.repair()
    assert unused(service.home) == []
    shutil.rmtree(service.version_folder(3))
    assert unused(service.home) == sorted(named(service, version))
    remove_unused(service.home)
    assert list(service.exports.iterdir()) == []


def test_a_version_that_cannot_be_read_keeps_what_there_is(
    service: Service, publish: Callable[..., VersionFile]
) -> None:
    """A newer Piccard may have written it, and names what this one does not see."""
    version = publish()
    file = service.version_folder(3) / "version.yaml"
    file.write_text(file.read_text().replace("schema: 1", "schema: 2"))
    remove_unused(service.home)
    assert all(path.exists() for path in named(service, version))


def test_doctor_finds_what_is_gone_or_changed(service: Service, publish: Callable[..., VersionFile]) -> None:
    export, kept = named(service, publish())
    traps = {each.trap for each in findings(operation_of(service))}
    kept.write_bytes(kept.read_bytes() + b"\0")
    export.rename(export.with_name(".moved"))
    now = {each.trap: each.problem for each in findings(operation_of(service))}
    assert now.keys() - traps >= {"export", "ops-library"}
    assert "is not what version 3 was published with" in now["ops-library"]


def test_a_new_home_has_two_implementations(tmp_path: Path, checkpoint: Path) -> None:
    home = tmp_path / "home"
    init_home(home, shipped_versions(str(checkpoint)))
    versions = [read_version_file(Service(home).version_folder(number)) for number in (1, 2)]
    assert [version.runner for version in versions] == [Runner.TORCH, Runner.ONNXRUNTIME]
    assert all(path.exists() for path in named(Service(home), versions[1]))


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"CXX": "no-such-compiler"}, "CXX names 'no-such-compiler'"),
        ({"XDG_CACHE_HOME": "/proc/nowhere"}, "the ONNX Runtime operators cannot be built in /proc/nowhere/"),
    ],
)
def test_a_new_home_does_without_what_the_library_is_built_with(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path / "cache")} | variables).items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    init_home(tmp_path / "home", shipped_versions(str(checkpoint)), tell=told.append)
    version = read_version_file(Service(tmp_path / "home").version_folder(2))
    assert (version.runner, version.export) == (Runner.TORCH, None)
    assert told[-1].startswith(f"v1.1.0 is served with runner torch: {why}")
