"""The link that names the stable version. It is read at every request, so a promotion is one rename."""

import os
import re
from pathlib import Path

from piccard_contract.home import VERSION_NAME

_NAME = re.compile(VERSION_NAME)


def read_stable(link: Path) -> int | None:
    """The version that `link` names, or None where there is no link, or it names no version of its folder.

    Only a bare name counts (`stable -> 3`): whatever else stands there was not put there by a promotion.
    """
    try:
        target = os.readlink(link)
    except OSError:
        return None
    if not _NAME.fullmatch(target) or not os.path.isdir(os.path.join(os.path.dirname(link), target)):
        return None
    return int(target)
