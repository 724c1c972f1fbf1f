"""Runs the rollouts of services, one thread for all: within `piccard serve`, or alone."""

import threading
from collections.abc import Callable

from piccard_contract.home import Service
from piccard_contract.process_lock import AlreadyHeldError

from piccard.rollout.controller import Controller, tick_told

TICK = 0.5

Tell = Callable[[str], None]


class Keeper:
    """Ticks the controller of each service; one whose lock another process holds is tried again.

    Args:
        services: those of the home now.
        ending: set once it is to end.
    """

    def __init__(self, services: Callable[[], list[Service]], tell: Tell, ending: threading.Event) -> None:
        self._services = services
        self._tell = tell
        self._ending = ending
        self._controllers: dict[str, Controller] = {}
        self._told: dict[str, str] = {}

    def run(self) -> None:
        """Tick until `ending` is set."""
        try:
            while not self._ending.wait(TICK):
                for service in self._services():
                    self._tick(service)
        finally:
            for controller in self._controllers.values():
                controller.close()

    def _tick(self, service: Service) -> None:
        controller = self._controllers.get(service.name)
        if controller is None:
            try:
                controller = self._controllers[service.name] = Controller(service, self._tell)
            except AlreadyHeldError:
                return
            except OSError as error:
                self._say(service, f"the rollout of {service.name} cannot be run: {error}")
                return
        self._told[service.name] = tick_told(controller, self._tell, self._told.get(service.name, ""))

    def _say(self, service: Service, what: str) -> None:
        if self._told.get(service.name) != what:
            self._tell(what)
        self._told[service.name] = what
