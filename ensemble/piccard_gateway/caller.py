"""Who sends a request, as the door found out."""

from dataclasses import dataclass

from piccard_contract.request import GatewayClaims
from starlette.types import Scope


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller.

    Attributes:
        tenant: whose prompts share a prefix cache, and whose tokens are counted together.
        priority: of a request that asks for none, and the best that is believed: lower goes first. None believes any.
        services: names of those that may be asked; None for all.
    """

    tenant: str = ""
    priority: int | None = None
    services: frozenset[str] | None = None

    def may_ask(self, service: str) -> bool:
        return self.services is None or service in self.services

    def claims(self, asked: int | None, secret: bytes) -> GatewayClaims | None:
        """Tenant and priority with the gateway's signature; None where there is nothing to vouch for.

        Args:
            asked: the priority that the request asks for, or None; a better one than the caller's own is not given.
        """
        own = self.priority
        priority = (own or 0) if asked is None else asked if own is None else max(asked, own)
        if not (self.tenant or priority):
            return None
        return GatewayClaims(tenant=self.tenant, priority=priority).sign(secret)


ANYONE = Caller()
_KEY = "piccard.caller"


def put_caller(scope: Scope, caller: Caller) -> None:
    """Note who sends the request of `scope`."""
    scope[_KEY] = caller


def caller_of(scope: Scope) -> Caller:
    """Who sends the request of `scope`."""
    caller = scope.get(_KEY, ANYONE)
    assert isinstance(caller, Caller)
    return caller
