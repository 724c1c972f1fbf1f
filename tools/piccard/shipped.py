"""Writes model_repository/ of the checkout: the form of a new service, as tritonserver reads it.

`python -m piccard.shipped model_repository` makes it anew after a change of the contract; a test holds it equal.
"""

import shutil
import sys
from pathlib import Path

from piccard_contract.home import Service

from piccard.home_init import shipped_versions
from piccard.repository import point_stable, write_service, write_version

SHIPPED_CHECKPOINT = "assets/demo"


def write_shipped(folder: Path) -> None:
    """Write the shipped model repository to `folder`, replacing what is there."""
    service = Service(folder.absolute().parent)
    if service.repository != folder.absolute():
        raise ValueError(f"the folder must be called {service.repository.name}, not {folder.name}")
    shutil.rmtree(folder, ignore_errors=True)
    versions = shipped_versions(SHIPPED_CHECKPOINT)
    write_service(service, min(versions))
    for number, version in versions.items():
        write_version(service.version_folder(number), version)
    point_stable(service, min(versions))


if __name__ == "__main__":
    write_shipped(Path(sys.argv[1]))
