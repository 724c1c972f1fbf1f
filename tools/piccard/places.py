"""What the processes of a service stand for."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from piccard_contract.home import Service, version_owner
from piccard_contract.process_lock import is_held


@dataclass(frozen=True, slots=True)
class Place:
    """A version, or admission or a router, whose process is of either of two folders.

    Attributes:
        owners: number of the folder -> name of its process.
    """

    service: Service
    model: str
    name: str
    owners: tuple[tuple[int, str], ...]

    @property
    def full_name(self) -> str:
        """Its name among those of all services."""
        return f"{self.service.name}/{self.name}"

    @property
    def is_version(self) -> bool:
        return self.model == self.service.llm

    @property
    def number(self) -> int:
        """Of a version, or of the first folder."""
        return self.owners[0][0]

    def living(self) -> set[int]:
        """Folders whose process lives."""
        return {folder for folder, _ in self.owners if is_held(self.lock(folder))}

    def dead_folder(self, ready: Collection[int]) -> int | None:
        """Of admission or a router, the folder whose process is dead though the server has it loaded.

        Args:
            ready: the folders that the server calls ready. Newer servers do not say so of one whose process is dead.
        """
        living = self.living()
        dead = sorted(set(ready) - living)
        if dead:
            return dead[0]
        return None if living else self.owners[0][0]

    def lock(self, folder: int) -> Path:
        """The lock that the process of a folder holds while it lives."""
        return self.service.process_lock(dict(self.owners)[folder])


def places(service: Service, versions: Iterable[int]) -> list[Place]:
    """The places of a service: those of `versions`, and of admission and the routers."""
    found = [
        Place(service, service.llm, version_owner(number), ((number, version_owner(number)),))
        for number in sorted(versions)
    ]
    return found + [
        Place(service, model, name, ((1, name), (2, f"{name}.2"))) for model, name in steps(service).items()
    ]


def steps(service: Service) -> dict[str, str]:
    """Models of the ensembles' steps -> names of their processes."""
    return {service.admission: "admission", service.router: "router", service.router_unary: "router_unary"}
