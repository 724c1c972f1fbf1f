"""How many cache blocks fit on a card beside the weights and the largest steps, found by running those."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deepseek_engine.gpu.device_model import DeviceModel
from deepseek_engine.gpu.prefill_groups import EXPANDED_TOKENS
from deepseek_engine.memory_budget import MemoryBudgetError
from deepseek_engine.runners.cuda import CudaRunner
from deepseek_engine.settings import EngineSettings

CONTEXT_BYTES = 600 << 20
"""What CUDA takes for a process beside its allocations: the context, loaded kernels and libraries."""
SLACK = 1.03
"""For the pieces that allocators leave unused."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a version on one card; measured, and this process's own alone.

    Attributes:
        weights: of the model, which is loaded already, with what it has taken for its steps beside torch.
        fixed: weights, and buffers of the runner.
        step: more at the peak of the largest step.
        graphs: what captured steps keep.
        block: of a cache block.
    """

    weights: int
    fixed: int
    step: int
    graphs: int
    block: int

    def blocks(self, budget: int, free: int) -> int:
        """Cache blocks within `budget` bytes; the card has `free` left beside what is loaded, the weights included.

        Raises:
            MemoryBudgetError: not even one, or the card has less left than the budget; with figures.
        """
        needed = CONTEXT_BYTES + int(SLACK * (self.fixed + self.step + self.graphs))
        parts = (
            f"weights and buffers take {_gib(self.fixed)}, the largest step {_gib(self.step)}, graphs "
            f"{_gib(self.graphs)}, CUDA itself {_gib(CONTEXT_BYTES)}"
        )
        if needed + self.block > budget:
            raise MemoryBudgetError(
                f"version.yaml: memory allows {_gib(budget)}, but {parts}, and a block of the cache "
                f"{_gib(self.block)}; raise memory, or take a smaller checkpoint or profile"
            )
        if budget - self.weights - CONTEXT_BYTES > free:
            raise MemoryBudgetError(
                f"version.yaml: memory allows {_gib(budget)}, of which {_gib(self.weights)} are taken, but the card "
                f"has only {_gib(free)} left beside the versions that are loaded; lower memory, or retire a version"
            )
        return (budget - needed) // self.block


def profile_memory(model: DeviceModel, settings: EngineSettings) -> MemoryProfile:
    """Run the largest steps over a small cache and see what they take.

    This compiles what long steps need. Everything is given back before it returns, but for the model.
    """
    device = model.device
    allocated = torch.cuda.memory_allocated(device)
    context = min(EXPANDED_TOKENS, settings.max_model_len or model.config.max_position_embeddings)
    blocks = -(-max(context, settings.max_num_batched_tokens) // settings.block_size) + 1
    runner = CudaRunner(model, replace(settings, max_model_len=context), num_blocks=blocks)
    block = model.cache_spec().bytes_per_token * settings.block_size
    runner.precompile()
    base = torch.cuda.memory_allocated(device)
    graphs = _peak(runner.largest_graphs, device) - base
    step = _peak(runner.longest_steps, device) - base
    del runner
    torch.cuda.empty_cache()
    # What lies between a session's operators is taken once and kept.
    outside = model.outside_bytes()
    return MemoryProfile(
        weights=allocated + outside,
        fixed=base - blocks * block + outside,
        step=step,
        graphs=graphs,
        block=block,
    )


def _peak(run: Callable[[], None], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
