"""Where a home keeps what. Live state never sits in a checkout; `piccard init DIR` makes a home."""

import re
from dataclasses import dataclass
from pathlib import Path

SERVICE_NAME = re.compile(r"^[a-z][a-z0-9_]{0,39}\Z")
DEFAULT_SERVICE = "deepseek"

# Folders that are versions. tritonserver reads others too: "5-old" is 5 to it, and 20 digits end it.
VERSION_NAME = r"^[1-9][0-9]{0,17}$"

# Folders of HOME/state that are no service's.
RESERVED_NAMES = frozenset({"keys", "logs"})

# What the names of a service's models end in; no service's own name does.
_SUFFIXES = ("_unary", "_admission", "_router", "_llm")


@dataclass(frozen=True, slots=True)
class Service:
    """One service of a home: six models under one name.

    Attributes:
        home: the home's folder.
        name: the public name, which is the ensemble's.
    """

    home: Path
    name: str = DEFAULT_SERVICE

    def __post_init__(self) -> None:
        if not SERVICE_NAME.match(self.name):
            raise ValueError(
                f"{self.name[:60]!a} is not a service name: a small letter, then up to 39 of a-z, 0-9 and _"
            )
        if self.name.endswith(_SUFFIXES):
            raise ValueError(
                f"{self.name!r} cannot be a service's name; models of another end in {', '.join(_SUFFIXES)}"
            )
        if self.name in RESERVED_NAMES:
            raise ValueError(f"{self.name!r} cannot be a service's name; a home keeps its {self.name} under it")

    @classmethod
    def of_model(cls, model_folder: Path) -> "Service":
        """The service that a model's folder in a home belongs to."""
        name = model_folder.name
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        return cls(model_folder.parent.parent, name)

    @property
    def ensemble(self) -> str:
        return self.name

    @property
    def unary(self) -> str:
        return f"{self.name}_unary"

    @property
    def admission(self) -> str:
        return f"{self.name}_admission"

    @property
    def router(self) -> str:
        return f"{self.name}_router"

    @property
    def router_unary(self) -> str:
        return f"{self.name}_router_unary"

    @property
    def llm(self) -> str:
        return f"{self.name}_llm"

    @property
    def models(self) -> tuple[str, ...]:
        """The six models; those that others call come first."""
        return (self.llm, self.admission, self.router, self.router_unary, self.ensemble, self.unary)

    @property
    def repository(self) -> Path:
        return self.home / "model_repository"

    @property
    def llm_folder(self) -> Path:
        return self.repository / self.llm

    @property
    def stable_link(self) -> Path:
        return self.llm_folder / "stable"

    def version_folder(self, version: int) -> Path:
        return self.llm_folder / str(version)

    @property
    def staging(self) -> Path:
        """Where a version is made; on the file system of the repository, so that a rename publishes it."""
        return self.home / "staging" / self.name

    @property
    def exports(self) -> Path:
        """Exports and operators' libraries of all services, named by their SHA-256."""
        return self.home / "exports"

    @property
    def state_folder(self) -> Path:
        return self.home / "state" / self.name

    @property
    def policy_file(self) -> Path:
        return self.state_folder / "policy.yaml"

    @property
    def state_json(self) -> Path:
        return self.state_folder / "state.json"

    @property
    def rollout_file(self) -> Path:
        """The rollout that is under way, or was the last."""
        return self.state_folder / "rollout.json"

    @property
    def golden_prompts(self) -> Path:
        """The golden prompts by which a rollout compares log-probabilities; without it there are built-in ones."""
        return self.state_folder / "golden.jsonl"

    @property
    def live_state(self) -> Path:
        """The memory-mapped state file."""
        return self.state_folder / "live.state"

    @property
    def run_folder(self) -> Path:
        """Locks of running processes, and what serves the operators of running versions."""
        return self.state_folder / "run"

    @property
    def audit_log(self) -> Path:
        return self.home / "state" / "audit.log"

    @property
    def request_log(self) -> Path:
        """One JSON line a request."""
        return self.home / "state" / "logs" / f"{self.name}.requests.log"

    @property
    def keys_folder(self) -> Path:
        return self.home / "state" / "keys"

    @property
    def gateway_secret(self) -> Path:
        """Secret of this start with which the gateway signs tenant and priority."""
        return self.keys_folder / "gateway.secret"

    @property
    def gateway_file(self) -> Path:
        """Limits and deadlines of the home's gateway."""
        return self.home / "state" / "gateway.yaml"

    @property
    def gateway_keys(self) -> Path:
        """Salted hashes of the keys that callers of the gateway show."""
        return self.keys_folder / "gateway.keys.json"

    @property
    def gateway_lock(self) -> Path:
        """The file whose flock the home's gateway holds while it lives."""
        return self.home / "state" / "gateway.lock"

    def process_lock(self, owner: str) -> Path:
        """The file whose flock the process `owner` (such as version-2 or router) holds while it lives."""
        return self.run_folder / f"{owner}.lock"

    def operators_file(self, version: int) -> Path:
        """What serves the operators of a running version (`piccard_contract.operators`)."""
        return self.run_folder / f"{version_owner(version)}.operators.json"


def version_owner(version: int) -> str:
    """Name of a version's section and lock."""
    return f"version-{version}"
