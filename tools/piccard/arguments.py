"""Names, numbers and paths of the command line, read strictly: what is odd is refused before anything is looked at."""

import math
import re
from pathlib import Path

import typer
from piccard_contract.home import VERSION_NAME


def version_number(text: str | int) -> int:
    """A version's number, as its folder is called: digits alone, no zero before them, 18 at most."""
    # Python's int() also reads "1_0", " 2" and the digits of other scripts.
    if not re.fullmatch(VERSION_NAME, str(text)):
        raise typer.BadParameter(f"{shown(str(text))} is not the number of a version, such as 2")
    return int(text)


def file_path(text: str | Path) -> Path:
    """A path of printable characters in UTF-8, since paths are kept in files and told in lines."""
    path = str(text)
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{shown(path)} is not UTF-8; rename it") from None
    if not path or not path.isprintable():
        raise typer.BadParameter(f"{shown(path)} is empty or has control characters; rename it")
    return Path(path)


def host_name(text: str) -> str:
    """An address to listen on. An empty one would mean every address of the machine, which has to be said."""
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise typer.BadParameter(f"{shown(text)} is no address; 127.0.0.1 is this machine alone, 0.0.0.0 every address")
    return text


def finite_seconds(text: str | float) -> float:
    """Seconds, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise typer.BadParameter(f"{shown(str(text))} is no number of seconds")
    return seconds


def shown(text: str) -> str:
    """A text in a message: quoted, escaped and not long."""
    quoted = ascii(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."
