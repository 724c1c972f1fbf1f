"""A step looks within each layer whether anybody still waits for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepseek_engine.departures import Interrupt, StepGivenUpError
from deepseek_engine.models import load_model
from deepseek_engine.runners.torch import TorchRunner
from deepseek_engine.settings import EngineSettings
from deepseek_engine.step_plan import NewSequence, StepPlan, StepRow
from piccard_contract.sampling import SamplingParams
from random_checkpoints import random_token_ids


class SetAt(Interrupt):
    """Is set by the look of this number, and counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks == self.at:
            self.set()
        super().check()


@pytest.mark.parametrize("family", ["v3", "llama"])
def test_a_step_ends_within_a_layer(family: str, checkpoint_folder: Callable[[str], Path]) -> None:
    model = load_model(checkpoint_folder(family), dtype=torch.float32)
    runner = TorchRunner(model, EngineSettings(num_blocks=8))
    layers: list[int] = []
    model.on_layer = lambda: layers.append(len(layers))
    ids = random_token_ids(40, 1)
    row = StepRow(0, ids, 0, [3, 1, 2], sample=True)
    new = [NewSequence(0, SamplingParams(temperature=0.0), ids, [], 0, (), 1)]

    never = SetAt(0)
    expected = runner.collect(runner.execute(StepPlan([row], new=new), never)).token_ids
    # Before each piece of attention, of which there is one here, after attention and after the rest.
    assert never.looks == 3 * model.config.num_hidden_layers
    for at in (1, 2, 3, 4):
        interrupt = SetAt(at)
        layers.clear()
        with pytest.raises(StepGivenUpError):
            runner.execute(StepPlan([row]), interrupt)
        assert (interrupt.looks, len(layers)) == (at, at // 3)
        assert runner.collect(runner.execute(StepPlan([row]))).token_ids == expected
