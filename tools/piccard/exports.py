"""What runner onnxruntime runs: exports and operators' libraries, kept in a home under the SHA-256 of what they hold.

They never change and lie outside of the versions' folders, so that building again touches no version that runs.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from piccard_contract.home import Service
from piccard_contract.version_file import Precision, Runner, VersionFile, VersionFileError, read_version_file

from piccard.durable_file import put_in_place
from piccard.errors import OperationError
from piccard.repository import version_numbers
from piccard.snapshot import export_hash, library_hash
from piccard.state_store import services_of

Tell = Callable[[str], None]


def with_export(
    service: Service, version: VersionFile, checkpoint: Path, tell: Tell, *, int4: bool = False
) -> VersionFile:
    """The version with an export and a library, both made and kept; with another runner as it is.

    They are for a GPU where the version's device is one by name.

    Args:
        int4: whether products and experts are packed in four bits.

    Raises:
        OperationError: the checkpoint cannot be exported for the device, or the library not built.
    """
    if version.runner is not Runner.ONNXRUNTIME:
        return version
    precision = _precision(version)
    library, library_sha = _keep_library(service, version.ops_library, on_gpu=precision is not Precision.FLOAT32)
    export, export_sha = _keep_export(service, checkpoint, tell, int4=int4, precision=precision)
    hashes = version.hashes.model_copy(update={"export": export_sha, "ops_library": library_sha})
    return version.model_copy(update={"export": export, "ops_library": library, "hashes": hashes})


def unused(home: Path) -> list[Path]:
    """Exports and libraries that no version of any service names; only who holds the operators' lock may remove them.

    None where a version.yaml cannot be read: a newer Piccard may have written it.
    """
    folder = Service(home).exports
    if not folder.is_dir():
        return []
    try:
        named = {home / name for name in _named(home)}
    except (OSError, VersionFileError):
        return []
    return sorted(path for path in folder.iterdir() if path not in named)


def remove_unused(home: Path) -> None:
    """Remove them."""
    for path in unused(home):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _named(home: Path) -> Iterator[str]:
    for service in services_of(home):
        for number in version_numbers(service):
            version = read_version_file(service.version_folder(number))
            yield from filter(None, (version.export, version.ops_library))


def _precision(version: VersionFile) -> Precision:
    """Of activations and cache: float32 on a CPU; on a GPU what version.yaml says."""
    if not version.device.startswith("cuda"):
        return Precision.FLOAT32
    if version.precision is Precision.FLOAT32:
        raise OperationError(
            "runner onnxruntime computes in bfloat16 or float16 on a GPU; publish with --precision auto", exit_code=2
        )
    return Precision.BFLOAT16 if version.precision is Precision.AUTO else version.precision


def _keep_library(service: Service, named: str | None, *, on_gpu: bool) -> tuple[str, str]:
    from deepseek_ops.build import BuildError

    try:
        library = _built(on_gpu=on_gpu) if named is None else service.home / named
    except BuildError as error:
        raise OperationError(str(error)) from error
    if not library.is_file():
        raise OperationError(f"--ops-library {library} is no file; leave it out to have the library built", exit_code=2)
    sha = library_hash(library)
    kept = service.exports / f"{sha}.so"
    if not kept.is_file():
        service.exports.mkdir(exist_ok=True)
        part = _part(service)
        shutil.copyfile(library, part)
        part.chmod(0o755)
        put_in_place(part, kept)
    return _relative(service, kept), sha


def _built(*, on_gpu: bool) -> Path:
    """Our own library. Raises BuildError."""
    if on_gpu:
        from deepseek_ops.cuda.build import build_cuda

        return build_cuda()
    from deepseek_ops.build import build

    return build()


def _keep_export(
    service: Service, checkpoint: Path, tell: Tell, *, int4: bool, precision: Precision
) -> tuple[str, str]:
    import torch
    from deepseek_engine.models import CheckpointError
    from deepseek_ops.exporter.export import ExportError, export
    from deepseek_ops.exporter.weight_format import Int4Format

    service.exports.mkdir(exist_ok=True)
    part = _part(service)
    shutil.rmtree(part, ignore_errors=True)
    try:
        packed = Int4Format() if int4 else None
        dtype: torch.dtype = getattr(torch, precision.value)
        export(checkpoint, part, lambda name: tell(f"exporting {name}"), format=packed, precision=dtype)
        sha = export_hash(part)
        kept = service.exports / sha
        if kept.is_dir():
            shutil.rmtree(part)
        else:
            put_in_place(part, kept)
    except (CheckpointError, ExportError) as error:
        raise OperationError(str(error)) from error
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OperationError(
            f"{service.exports} cannot take the export ({error.strerror}); free space or make it writable"
        ) from error
    return _relative(service, kept), sha


def _part(service: Service) -> Path:
    """Where something is made before it has its name; doctor finds it when this process has ended meanwhile."""
    return service.exports / f".part.{os.getpid()}.tmp"


def _relative(service: Service, path: Path) -> str:
    return str(path.relative_to(service.home))
