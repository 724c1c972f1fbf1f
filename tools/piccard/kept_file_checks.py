"""Whether files can be read that people write, or that a disk may have spoiled; what needs one goes on without it."""

from collections.abc import Callable, Iterator

from piccard_contract.gateway_file import GatewayFileError, read_gateway_file

from piccard.errors import OperationError
from piccard.finding import Finding
from piccard.gateway_keys import list_keys
from piccard.operation import Operation
from piccard.rollout.golden_prompts import golden_prompts
from piccard.rollout.store import RolloutStore


def kept_file_findings(op: Operation) -> Iterator[Finding]:
    """Files of rollouts and of the gateway that cannot be read."""
    service = op.service
    checks: tuple[tuple[str, Callable[[], object], str], ...] = (
        (
            "rollout",
            RolloutStore(service).read,
            f"nobody watches a canary by it: move {service.rollout_file} away and see to the canary's ratio",
        ),
        ("golden", lambda: golden_prompts(service), "mend it; until then no rollout passes 5 %"),
        ("gateway", lambda: read_gateway_file(service.gateway_file), "mend it; the gateway keeps to what it read"),
        ("keys", lambda: list_keys(service.home), "restore it; the gateway keeps to the keys that it read"),
    )
    for trap, read, remedy in checks:
        try:
            read()
        except (OperationError, GatewayFileError, OSError) as error:
            yield Finding(trap, str(error), remedy)
