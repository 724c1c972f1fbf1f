"""How the tests are shared out among the processes of pytest-xdist."""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Their tests are long and need nothing of each other.
ONE_BY_ONE = ("test_aot.py", "test_interpreter.py")


SERVER = "tests/server/"


class Shares(LoadScopeScheduling):  # type: ignore[misc]
    """A file stays whole, for its fixtures' sake.

    The first process takes the files of real servers first and the others what needs none, so that one server runs at a
    time on a small machine until nothing else is left; then they help. Of either kind the largest files go first, and
    so what is shared one by one fills the end.
    """

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        wants_servers = node is next(iter(self.nodes))
        chosen = next((share for share in self.workqueue if share.startswith(SERVER) == wants_servers), None)
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)


def share_of(nodeid: str) -> str:
    """The name of the share that a test belongs to."""
    file = nodeid.partition("::")[0]
    return nodeid if file.endswith(ONE_BY_ONE) else file
