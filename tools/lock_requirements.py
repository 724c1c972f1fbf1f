"""Writes requirements/*.txt: the exact versions of what pyproject.toml asks for, as they are installed here.

`make lock` runs it. torch stands alone, since which build of it to take depends on the machine.
"""

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
HEAD = "# Made by `make lock` from pyproject.toml and what is installed in .venv.\n"


def main() -> None:
    """Write torch.txt, runtime.txt and dev.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    runtime = closure(project["project"]["dependencies"])
    dev = closure(project["dependency-groups"]["dev"] + ["setuptools", "wheel"])
    write("torch", {"torch": runtime.pop("torch")})
    write("runtime", runtime)
    write("dev", {name: version for name, version in dev.items() if name not in runtime and name != "torch"})


def closure(wanted: list[str]) -> dict[str, str]:
    """Name -> version of everything that `wanted` needs, itself included."""
    found: dict[str, str] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in wanted]
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        key = (name, frozenset(requirement.extras))
        if key in done:
            continue
        done.add(key)
        installed = distribution(name)
        # A local version such as 2.13.0+cpu names a build, which is the machine's choice.
        found[name] = installed.version.partition("+")[0]
        for text in installed.requires or []:
            needed = Requirement(text)
            extras = {"", *requirement.extras}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    return found


def write(name: str, versions: dict[str, str]) -> None:
    """Write one file, sorted by name."""
    lines = [f"{package}=={version}\n" for package, version in sorted(versions.items())]
    (ROOT / "requirements" / f"{name}.txt").write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
