"""No name, label, number or path of the command line escapes: whatever is odd is refused and writes nothing."""

import hashlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard.repository import point_stable, stable_target, version_numbers
from piccard.state_store import services_of
from piccard_contract.home import Service
from piccard_contract.version_file import VersionFileError, parse_version_file

Command = Callable[..., "subprocess.CompletedProcess[str]"]

# What attackers and accidents write.
HOSTILE = [
    "",
    " ",
    ".",
    "..",
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a/../b",
    "a\\b",
    "a\nb",
    "a\n",
    "\n",
    "a\rb",
    "a\tb",
    "\x1b[31mred",
    "a\x7f",
    "a\x85b",
    "a\u2028b",
    "a\u202eb",
    "\ud800",
    "x" * 10_000,
    "9" * 20,
    "0",
    "00",
    "01",
    "1_0",
    "1e3",
    "1.0",
    "+1",
    " 1",
    "1 ",
    "1\n",
    "-1",
    "5-old",
    "٣",
    "２",
    "²",
    "0x10",
    "*",
    "?",
    "~",
    "~root",
    "$HOME",
    "`id`",
    "$(id)",
    "a;b",
    "a&b",
    "a|b",
    "%s%n",
    "{0}",
    "{{ x }}",
    "!!python/object:os.system",
    "&a [*a]",
    "null",
    "UPPER",
    "Ünicode",
    "deepseek_llm",
    "deepseek_router_unary",
    "keys",
    "logs",
    "-",
    "--",
    "--help-me",
    "deepseek\x1f",
    "DEEPSEEK",
]

hostile = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40), st.text("./\\-_0123456789a\n", max_size=12)).filter(
    # The kernel hands no argument with a NUL to a program.
    lambda text: "\0" not in text
)

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
SERVICE = re.compile(r"[a-z][a-z0-9_]{0,39}")

PUBLISH = ("publish", "scripted", "--runner=scripted")

# A command with a place for a name, and what would be a good name there: those are left out.
FIELDS: dict[str, tuple[Callable[[str], tuple[str, ...]], Callable[[str], bool]]] = {
    "publish --label": (lambda name: (*PUBLISH, f"--label={name}"), lambda name: bool(LABEL.fullmatch(name))),
    "publish --service": (
        lambda name: (*PUBLISH, "--label=x", f"--service={name}"),
        lambda name: bool(SERVICE.fullmatch(name)),
    ),
    "publish --profile": (lambda name: (*PUBLISH, "--label=x", f"--profile={name}"), lambda name: False),
    "publish --precision": (lambda name: (*PUBLISH, "--label=x", f"--precision={name}"), lambda name: False),
    "publish --device": (lambda name: (*PUBLISH, "--label=x", f"--device={name}"), lambda name: False),
    "publish --memory": (
        lambda name: (*PUBLISH, "--label=x", f"--memory={name}"),
        lambda name: _share(name),
    ),
    "publish --max-model-len": (
        lambda name: (*PUBLISH, "--label=x", f"--max-model-len={name}"),
        lambda name: _number(name) and 1 <= float(name) < 2**31,
    ),
    "publish --runner": (lambda name: ("publish", "scripted", "--label=x", f"--runner={name}"), lambda name: False),
    "publish --ops-library": (
        lambda name: (*PUBLISH[:2], "--runner=onnxruntime", "--label=x", f"--ops-library={name}"),
        lambda name: False,
    ),
    "publish CHECKPOINT": (lambda name: ("publish", "--label=x", "--", name), lambda name: False),
    "promote VERSION": (lambda name: ("promote", "--", name), lambda name: name in ("1", "2")),
    "retire VERSION": (lambda name: ("retire", "--", name), lambda name: name in ("1", "2")),
    "canary set --version": (
        lambda name: ("canary", "set", f"--version={name}", "--ratio=0.5"),
        lambda name: name in ("1", "2"),
    ),
    "canary set --ratio": (
        lambda name: ("canary", "set", "--version=2", f"--ratio={name}"),
        lambda name: _number(name) and 0 <= float(name) <= 1,
    ),
    "retire --wait": (
        lambda name: ("retire", "2", f"--wait={name}"),
        lambda name: False,
    ),
    "init --runner": (lambda name: ("init", f"--runner={name}"), lambda name: name in ("torch", "scripted")),
    **{
        f"{' '.join(command)} --service": (
            lambda name, command=command: (*command, f"--service={name}"),  # type: ignore[misc]
            lambda name: name == "deepseek",
        )
        for command in (
            ("promote", "2"),
            ("rollback",),
            ("retire", "2"),
            ("canary", "set", "--version=2", "--ratio=0.5"),
            ("canary", "off"),
            ("status",),
            ("doctor",),
        )
    },
}


# Where every odd name is tried; elsewhere every fifth is, for each takes a command line some time.
ALL_NAMES = ("publish --label", "publish --service", "promote VERSION")


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _share(text: str) -> bool:
    good = re.fullmatch(r"[1-9][0-9]*(\.[0-9]+)?(MiB|GiB|TiB)", text)
    return bool(good) or (_number(text) and 0 < float(text) <= 1)


def whole_tree(folder: Path) -> dict[str, str]:
    """What everything in a folder is and holds; locks are taken, which says nothing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".lock":
            continue
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = "folder"
    return found


def check_refused(result: "subprocess.CompletedProcess[str]") -> None:
    assert result.returncode in (1, 2), result.stderr
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("piccard: ")]
    assert len(said) == 1 or "Error" in result.stderr, result.stderr
    assert len(result.stderr) < 3000, len(result.stderr)
    # What was sent comes back escaped, so that it cannot draw on the operator's terminal.
    assert "\x1b[31m" not in result.stderr
    assert "\u202e" not in result.stderr


@pytest.mark.parametrize("field", FIELDS)
def test_no_odd_name_is_taken(service: Service, piccard: Command, field: str) -> None:
    command, good = FIELDS[field]
    before = whole_tree(service.home.parent)
    for name in HOSTILE if field in ALL_NAMES else HOSTILE[::5]:
        if not good(name):
            check_refused(piccard(service.home, *command(name), check=False))
    assert whole_tree(service.home.parent) == before


def test_no_name_at_all_escapes(service: Service, piccard: Command) -> None:
    before = whole_tree(service.home.parent)

    @settings(max_examples=100, deadline=None)
    @given(field=st.sampled_from(sorted(FIELDS)), name=hostile)
    def refused(field: str, name: str) -> None:
        command, good = FIELDS[field]
        if not good(name):
            check_refused(piccard(service.home, *command(name), check=False))

    refused()
    assert whole_tree(service.home.parent) == before


@pytest.mark.parametrize("command", [("status",), ("doctor",), ("promote", "2"), ("init", "--runner=scripted")])
@pytest.mark.parametrize("name", [name for name in HOSTILE if not name.isprintable() or name == "\ud800"])
def test_no_odd_home_is_taken(tmp_path: Path, command_line: Command, command: tuple[str, ...], name: str) -> None:
    before = whole_tree(tmp_path)
    check_refused(command_line(*command, f"--home={tmp_path}/{name}"))
    assert whole_tree(tmp_path) == before


@pytest.mark.parametrize("host", ["", " ", "a\nb", "x" * 10_000, "..", "a..b", "é" * 80])
def test_no_odd_host_is_listened_on(service: Service, piccard: Command, host: str) -> None:
    result = piccard(service.home, "serve", f"--host={host}", check=False)
    assert result.returncode in (1, 2)
    assert "Traceback" not in result.stderr
    assert not (service.home / "state" / "logs" / "tritonserver.log").exists()


def test_publish_says_that_a_version_is_code(service: Service, piccard: Command, command_line: Command) -> None:
    assert "code" in command_line("publish", "--help").stdout
    assert "publish what you trust" in piccard(service.home, *PUBLISH, "--label=x").stderr
    assert "publish what you trust" in piccard(service.home, *PUBLISH, "--label=y", "--service=other").stderr


@pytest.mark.parametrize("target", ["..", "../..", "/etc", "2/../..", "2/", "./2", "02", "2\n", "5-old", "9" * 20])
def test_a_stable_link_that_leads_elsewhere_names_no_version(service: Service, piccard: Command, target: str) -> None:
    service.stable_link.unlink()
    service.stable_link.symlink_to(target)
    assert stable_target(service) is None
    assert piccard(service.home, "doctor", check=False).returncode == 1
    piccard(service.home, "doctor", "--repair", check=False)
    assert stable_target(service) == 1


@pytest.mark.parametrize("name", ["5-old", "3\n", "03", "0", "9" * 20, "-1", "٣"])
def test_an_odd_folder_is_no_version(service: Service, piccard: Command, name: str) -> None:
    folder = service.llm_folder / name
    folder.mkdir()
    assert version_numbers(service) == [1, 2]
    found = piccard(service.home, "doctor", check=False)
    assert found.returncode == 1
    assert "folder-name" in found.stdout


@pytest.mark.parametrize("name", ["Not-A-Name", "..x", "deepseek_llm", "a b"])
def test_an_odd_folder_is_no_service(service: Service, piccard: Command, name: str) -> None:
    folder = service.home / "state" / name
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    assert [found.name for found in services_of(service.home)] == ["deepseek"]
    piccard(service.home, "status")


@pytest.mark.parametrize("kind", ["a file", "a folder", "nothing", "the folder itself"])
def test_a_version_with_a_link_out_is_not_served(service: Service, piccard: Command, tmp_path: Path, kind: str) -> None:
    folder = service.version_folder(2)
    outside = tmp_path / "outside"
    if kind == "the folder itself":
        folder.rename(outside)
        folder.symlink_to(outside)
    else:
        outside.mkdir()
        (outside / "secret").write_text("x")
        target = {"a file": outside / "secret", "a folder": outside, "nothing": tmp_path / "nowhere"}[kind]
        (folder / "extra").symlink_to(target)
    before = whole_tree(service.home)
    for command in (("promote", "2"), ("canary", "set", "--version=2", "--ratio=0.5")):
        result = piccard(service.home, *command, check=False)
        check_refused(result)
        assert "link" in result.stderr or "leads out" in result.stderr
    assert whole_tree(service.home) == before
    assert piccard(service.home, "doctor", check=False).returncode == 1


def test_stable_is_never_pointed_at_what_is_not_there(service: Service) -> None:
    with pytest.raises(FileNotFoundError):
        point_stable(service, 7)
    assert stable_target(service) == 1


@pytest.mark.parametrize("key", ["checkpoint", "export", "ops_library"])
@pytest.mark.parametrize("path", ["../up", "a/../../b", "..", "a\nb", "\x1b"])
def test_no_path_of_a_version_leaves_the_home(key: str, path: str) -> None:
    given = {"label": "v1", "checkpoint": "assets", key: path}
    text = "".join(f"{name}: {ascii_yaml(value)}\n" for name, value in given.items())
    with pytest.raises(VersionFileError, match=key):
        parse_version_file(text)


def ascii_yaml(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode() + '"'
