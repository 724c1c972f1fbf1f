"""An installation of Piccard that a test may upgrade: its own copy of the packages, in an environment of its own."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

from piccard_contract.code_hash import package_folder
from piccard_server import RunningServer, run_piccard

PACKAGES = ("piccard_contract", "deepseek_engine", "piccard_canary", "piccard_gateway", "piccard")


class Installation:
    """Copies of the packages, and a Python that finds these first and everything else where the tests find it.

    Attributes:
        python: runs the copies, for the command and for a server's processes alike.
    """

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        for name in PACKAGES:
            shutil.copytree(package_folder(name), self.packages / name, ignore=shutil.ignore_patterns("__pycache__"))
        venv.create(folder / "env", symlinks=True)
        self.python = folder / "env" / "bin" / "python"
        names = {"base": str(folder / "env"), "platbase": str(folder / "env")}
        site = Path(sysconfig.get_path("purelib", "venv", vars=names))
        # A path named here adds itself alone, so the tests' own editable packages stay out.
        (site / "piccard.pth").write_text(f"{self.packages}\n{sysconfig.get_path('purelib')}\n")

    def change(self, module: str, change: Callable[[str], str]) -> None:
        """Upgrade one file, such as "deepseek_engine/version.py"; the change has to change it."""
        path = self.packages / module
        text = path.read_text(encoding="utf-8")
        changed = change(text)
        assert changed != text, f"{module} stays as it is"
        # As an installer does: running processes keep what they have read.
        temporary = path.with_suffix(".new")
        temporary.write_text(changed, encoding="utf-8")
        os.replace(temporary, path)

    def append(self, module: str, text: str) -> None:
        """Upgrade one file by code at its end."""
        self.change(module, lambda before: f"{before}\n\n{text}")

    def run(self, home: Path, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run this installation's piccard command against a home."""
        return run_piccard(home, *arguments, check=check, python=self.python)


class InstalledServer(RunningServer):
    """A server of an `Installation`."""

    def __init__(self, installation: Installation, home: Path, *options: str) -> None:
        self.installation = installation
        super().__init__(home, *options, python=installation.python)

    def piccard(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.installation.run(self.home, *arguments, check=check)


if __name__ == "__main__":
    print(Installation(Path(sys.argv[1])).python)
