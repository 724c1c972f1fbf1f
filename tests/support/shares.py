"""How the tests are shared out among the processes of pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

# Their tests are long and need nothing of each other.
ONE_BY_ONE = ("test_aot.py", "test_interpreter.py")


class Shares(LoadScopeScheduling):  # type: ignore[misc]
    """A file stays whole, for its fixtures' sake; the real servers stay together, one at a time for a small machine.

    The largest shares are given out first, and so what is shared one by one fills the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


def share_of(nodeid: str) -> str:
    """The name of the share that a test belongs to."""
    file = nodeid.partition("::")[0]
    if "/server/" in file:
        return "server"
    return nodeid if file.endswith(ONE_BY_ONE) else file
