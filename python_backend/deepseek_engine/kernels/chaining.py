# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Lets a kernel start while the one before it still runs, on architectures that can (sm_90 and newer).

Programmatic dependent launch: a launch waits, in the kernel and not before it, for everything that the launches before
it wrote. What a kernel does ahead of `follow` overlaps with the end of its predecessor, and may read only what no
kernel writes: weights. A kernel that is chained has to call `follow` in every program, since the launch after it relies
on it for what came before. (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait for the launches before this one, and let the next one start meanwhile."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
