"""What all routes share: turns a body and its headers into generations."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piccard_contract.errors import ErrorCode
from piccard_contract.gateway_file import GatewayFile

from piccard_gateway.caller import Caller
from piccard_gateway.catalogue import Catalogue, Offer
from piccard_gateway.deadlines import FirstTokenDeadlines
from piccard_gateway.errors import ApiError, refused
from piccard_gateway.fill_in_middle import GapTokens
from piccard_gateway.generator import Generation, Generator
from piccard_gateway.headers import priority_of, request_id_of, routing_parameters
from piccard_gateway.schemas import Body, ChatBody
from piccard_gateway.settings_file import SettingsFile

# Milliseconds between the responses of a request that is answered as a whole: nobody sees them one by one.
WHOLE_ANSWER_COALESCE = 1000

# Beside the deadlines of the policy: one version's may pass, and then another's begins.
_ATTEMPTS = 2
_SLACK = 5.0


@dataclass(slots=True)
class Gateway:
    """The parts that routes need.

    Attributes:
        secret: signs tenant and priority.
    """

    generator: Generator
    catalogue: Catalogue
    settings: SettingsFile
    deadlines: FirstTokenDeadlines
    gaps: GapTokens
    secret: bytes

    def current(self) -> GatewayFile:
        """The settings of a request that starts now."""
        return self.settings.current()


@dataclass(slots=True)
class Incoming:
    """One request on its way in.

    Attributes:
        headers: names fold case.
        caller: who sends it.
    """

    gateway: Gateway
    body: Body
    headers: Mapping[str, str]
    caller: Caller

    def offer(self) -> Offer:
        """The service that is asked for.

        Raises:
            ApiError: 404 where there is none of that name, 403 where the caller may not ask it.
        """
        name = self.body.model
        offer = self.gateway.catalogue.find(name)
        if not self.caller.may_ask(name):
            raise ApiError(403, "model_not_allowed", f"this key may not ask the model {name[:64]!r}", "model")
        if offer is None:
            known = ", ".join(self.gateway.catalogue.offers())
            raise ApiError(404, "model_not_found", f"there is no model {name[:64]!r}; there is {known}", "model")
        return offer

    def request_id(self) -> str:
        """The client's id of the request, or a new one."""
        return request_id_of(self.headers, uuid.uuid4().hex)

    def generation(self, offer: Offer, sampling: dict[str, Any], request_id: str, **prompt: Any) -> Generation:
        """One generation.

        Args:
            prompt: text, messages or input_ids.
        """
        seconds = offer.policy.deadlines
        size = _size(prompt)
        return Generation(
            service=offer.service.name,
            sampling=sampling,
            extensions=self._extensions(),
            parameters={
                **routing_parameters(self.headers, offer.routing_headers(), request_id),
                **self._parameters(),
            },
            first_token=self.gateway.deadlines.seconds(size, _ATTEMPTS * seconds.first_token + _SLACK),
            between_tokens=seconds.between_tokens + seconds.first_token + _SLACK,
            size=size,
            **prompt,
        )

    def check_messages(self, messages: list[dict[str, Any]]) -> None:
        """Refuse a chat of too many messages.

        Raises:
            ApiError: 413.
        """
        most = self.gateway.current().limits.messages
        if len(messages) > most:
            raise refused(
                ErrorCode.REQUEST_TOO_LARGE, f"a chat takes {most} messages, {len(messages)} were sent", "messages"
            )

    def _extensions(self) -> dict[str, Any]:
        extensions = dict(self.body.extensions)
        claims = self.caller.claims(priority_of(self.headers), self.gateway.secret)
        if claims is not None:
            extensions["gateway"] = claims.model_dump()
        if isinstance(self.body, ChatBody):
            extensions["separate_reasoning"] = True
        if not self.body.stream:
            extensions.setdefault("coalesce_ms", WHOLE_ANSWER_COALESCE)
        return extensions

    def _parameters(self) -> dict[str, str | int]:
        parameters: dict[str, str | int] = {}
        if self.body.version is not None:
            parameters["version"] = self.body.version
        if self.body.user:
            parameters["user"] = self.body.user
        return parameters


def now() -> int:
    """Unix time in whole seconds, as answers tell it."""
    return int(time.time())


def _size(prompt: Mapping[str, Any]) -> int:
    """About how many bytes of text a prompt has."""
    if prompt.get("input_ids"):
        return 4 * len(prompt["input_ids"])
    if prompt.get("messages"):
        return sum(len(str(message.get("content", ""))) for message in prompt["messages"])
    return len(prompt["text"])
