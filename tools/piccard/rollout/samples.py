"""What the last look at a rollout said, as metrics."""

from piccard_canary.rollout.course import ENDED, RolloutState
from piccard_canary.rollout.judgement import Verdict
from piccard_contract.file_watch import FileWatch
from piccard_contract.home import Service
from piccard_contract.reports import Samples

from piccard.errors import OperationError
from piccard.rollout.store import RolloutStore


class RolloutSamples:
    """Samples of one service's rollout, whoever runs it; they are made anew when its file has changed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = RolloutStore(service)
        self._watch = FileWatch(service.rollout_file)
        self._samples: Samples = []

    def now(self) -> Samples:
        """The samples; none where no rollout is under way, or its file cannot be read."""
        if self._watch.changed():
            try:
                self._samples = samples_of(self._service, self._store.read())
            except OperationError:
                self._samples = []
        return self._samples


def samples_of(service: Service, state: RolloutState | None) -> Samples:
    """Verdicts, one of them 1, and the figures of both versions by metric."""
    if state is None or state.phase in ENDED or state.judgement is None:
        return []
    found: Samples = []
    for name, metric in state.judgement.metrics.items():
        labels = {"service": service.name, "metric": name}
        canary, stable = (labels | {"version": str(number)} for number in (state.canary, state.stable))
        found += [
            ("piccard_rollout_verdict", canary | {"verdict": one.value}, float(one is metric.verdict))
            for one in Verdict
        ]
        if metric.known:
            found.append(("piccard_rollout_figure", canary, metric.canary))
            found.append(("piccard_rollout_figure", stable, metric.stable))
    return found
