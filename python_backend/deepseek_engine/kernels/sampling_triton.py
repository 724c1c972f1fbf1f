# mypy: disable-error-code="no-untyped-def"
# Device functions have no types that mypy knows.
"""Sampling on a GPU; the reference is `sampling.py`, and `random_numbers.py` for the draw's number.

For each row, in vLLM's order: penalties, logit bias and forbidden tokens, the token mask, temperature, min_p, top_k,
top_p, then the draw by inverting the cumulated distribution in vocabulary order, or the largest logit where the
temperature is 0. Three launches:

`sample_edit` (row, chunk of the vocabulary) writes edited logits over the temperature, and the largest of each chunk.
`sample_mass` (row, chunk) sums exp(x - peak), where neither top_k nor top_p has to find a floor first.
`sample_draw` (row) finds the filters' floors by quartering intervals of the float's ordered bits: the smallest t with
count(x > t) < top_k is the top_k-th largest logit, the smallest t with mass(x > t) < top_p * total the nucleus's last;
ties with it stay, as in the reference. A chunk whose largest is not above t is skipped without being read. Masses and
the draw are summed in float64, so that a seeded row gives the reference's token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepseek_engine.kernels import launcher
from deepseek_engine.kernels.chaining import follow
from deepseek_engine.kernels.dispatch import require
from deepseek_engine.kernels.variants import Kernel, LaunchPlan, Step, Table, Variant, ceil_div

PHILOX_ROUNDS = tl.constexpr(10)


@triton.jit
def uniform_of(seed, position, choice, purpose):
    """`random_numbers.uniform`: Philox4x32-10 of (position, choice, purpose, 0) under the seed, in [0, 1)."""
    mask = tl.full((), 0xFFFFFFFF, tl.uint64)
    half = tl.full((), 32, tl.uint64)
    c0 = position.to(tl.uint64) & mask
    c1 = choice.to(tl.uint64) & mask
    c2 = purpose.to(tl.uint64) & mask
    c3 = tl.zeros((), tl.uint64)
    k0 = seed.to(tl.uint64, bitcast=True) & mask
    k1 = (seed.to(tl.uint64, bitcast=True) >> half) & mask
    m0 = tl.full((), 0xD2511F53, tl.uint64)
    m1 = tl.full((), 0xCD9E8D57, tl.uint64)
    w0 = tl.full((), 0x9E3779B9, tl.uint64)
    w1 = tl.full((), 0xBB67AE85, tl.uint64)
    for _ in tl.static_range(PHILOX_ROUNDS):
        product0 = m0 * c0
        product1 = m1 * c2
        c0, c1, c2, c3 = (
            (product1 >> half) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> half) ^ c3 ^ k1,
            product0 & mask,
        )
        k0 = (k0 + w0) & mask
        k1 = (k1 + w1) & mask
    bits = ((c0 << half) | c1) >> tl.full((), 11, tl.uint64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def ordered(x):
    """int32 that sorts as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def float_of(order):
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def sample_edit_kernel(
    logits_ptr,
    edited_ptr,
    peaks_ptr,
    faults_ptr,
    temperature_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    penalty_rows_ptr,
    counts_ptr,
    prompt_ptr,
    mask_rows_ptr,
    masks_ptr,
    edit_starts_ptr,
    edit_tokens_ptr,
    edit_values_ptr,
    logits_stride,
    mask_stride,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf"))
    # Infinity and NaN mean that the model failed; -inf alone does not.
    fault = tl.sum(tl.where((x != x) | (x == float("inf")), 1, 0), axis=0)
    penalty_row = tl.load(penalty_rows_ptr + row).to(tl.int64)
    if penalty_row >= 0:
        place = penalty_row * vocabulary + token
        count = tl.load(counts_ptr + place, mask=inside, other=0)
        prompt = tl.load(prompt_ptr + place, mask=inside, other=0)
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        factor = tl.where((count > 0) | (prompt != 0), repetition, 1.0)
        # The reference divides exactly; the plain operator would be two units in the last place off.
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    for edit in tl.range(tl.load(edit_starts_ptr + row), tl.load(edit_starts_ptr + row + 1)):
        value = tl.load(edit_values_ptr + edit)
        x = tl.where(token == tl.load(edit_tokens_ptr + edit), x + value, x)
    mask_row = tl.load(mask_rows_ptr + row).to(tl.int64)
    if mask_row >= 0:
        byte = tl.load(masks_ptr + mask_row * mask_stride + token // 8, mask=inside, other=0).to(tl.int32)
        x = tl.where(((byte >> (token % 8)) & 1) != 0, x, float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.zeros((CHUNK,), tl.float32) + tl.where(temperature > 0.0, temperature, 1.0)
    x = tl.where(inside, tl.div_rn(x, divisor), float("-inf"))
    tl.store(edited_ptr + row * vocabulary + token, x, mask=inside)
    tl.store(peaks_ptr + row * chunks + chunk, tl.max(x, axis=0))
    tl.store(faults_ptr + row * chunks + chunk, fault)


@triton.jit
def above(x, floor, peak, MASS: tl.constexpr):
    """What logits above `floor` count for, elementwise: 1, or exp(x - peak)."""
    share = tl.exp(x - peak).to(tl.float64) if MASS else tl.full(x.shape, 1.0, tl.float64)
    return tl.where(x > floor, share, 0.0)


@triton.jit
def count_above(
    edited_row, peaks_row, low, middle, high, vocabulary, chunks, peak, MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """How many logits lie above each of three rising floors, or their mass, as float64."""
    count_low = tl.zeros((CHUNK,), tl.float64)
    count_middle = tl.zeros((CHUNK,), tl.float64)
    count_high = tl.zeros((CHUNK,), tl.float64)
    for chunk in tl.range(0, chunks):
        if tl.load(peaks_row + chunk) > low:
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(edited_row + token, mask=token < vocabulary, other=float("-inf"))
            count_low += above(x, low, peak, MASS)
            count_middle += above(x, middle, peak, MASS)
            count_high += above(x, high, peak, MASS)
    return tl.sum(count_low, axis=0), tl.sum(count_middle, axis=0), tl.sum(count_high, axis=0)


@triton.jit
def floor_of(edited_row, peaks_row, low, peak, limit, vocabulary, chunks, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest float t >= low with less than the limit above it; a pass over the row quarters the interval."""
    under = ordered(low).to(tl.int64)
    over = ordered(peak).to(tl.int64)
    while under < over:
        width = over - under
        first, second, third = under + width // 4, under + width // 2, under + width * 3 // 4
        one, two, three = count_above(
            edited_row,
            peaks_row,
            float_of(first),
            float_of(second),
            float_of(third),
            vocabulary,
            chunks,
            peak,
            MASS,
            CHUNK,
        )
        over = tl.where(one < limit, first, tl.where(two < limit, second, tl.where(three < limit, third, over)))
        under = tl.where(
            one < limit,
            under,
            tl.where(two < limit, first + 1, tl.where(three < limit, second + 1, third + 1)),
        )
    return float_of(under)


@triton.jit
def lowest_of(min_p_ptr, row, peak):
    """What min_p leaves: logits from here on."""
    min_p = tl.load(min_p_ptr + row)
    return tl.where(min_p > 0.0, peak + tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))


@triton.jit
def masses_of(edited_row, chunk, floor, peak, vocabulary, CHUNK: tl.constexpr):
    """float64 [CHUNK]: exp(x - peak) of what lies at the floor or above it, else 0."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(edited_row + token, mask=token < vocabulary, other=float("-inf"))
    return tl.where(x >= floor, tl.exp(x - peak), 0.0).to(tl.float64)


@triton.jit
def sample_mass_kernel(
    edited_ptr,
    peaks_ptr,
    masses_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    positions_ptr,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each chunk's mass, for rows whose draw needs no floor to be found first."""
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    top_k = tl.load(top_k_ptr + row)
    plain = (tl.load(top_p_ptr + row) >= 1.0) & ((top_k <= 0) | (top_k >= vocabulary))
    if plain & (tl.load(temperature_ptr + row) > 0.0) & (tl.load(positions_ptr + row) >= 0):
        lane = tl.arange(0, BLOCK_CHUNKS)
        peak = tl.max(tl.load(peaks_ptr + row * chunks + lane, mask=lane < chunks, other=float("-inf")), axis=0)
        # A row without a finite logit fails in the draw.
        floor = lowest_of(min_p_ptr, row, peak)
        kept = masses_of(edited_ptr + row * vocabulary, chunk, floor, peak, vocabulary, CHUNK)
        tl.store(masses_ptr + row * chunks + chunk, tl.sum(kept, axis=0))


@triton.jit
def sample_draw_kernel(
    edited_ptr,
    peaks_ptr,
    faults_ptr,
    masses_ptr,
    tokens_ptr,
    status_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    penalty_rows_ptr,
    counts_ptr,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if position >= 0:
        edited_row = edited_ptr + row * vocabulary
        peaks_row = peaks_ptr + row * chunks
        lane = tl.arange(0, BLOCK_CHUNKS)
        peaks = tl.load(peaks_row + lane, mask=lane < chunks, other=float("-inf"))
        faults = tl.load(faults_ptr + row * chunks + lane, mask=lane < chunks, other=0)
        peak, best_chunk = tl.max(peaks, axis=0, return_indices=True)
        fault = tl.sum(faults, axis=0)
        status = tl.where(fault > 0, 1, tl.where(peak == float("-inf"), 2, 0))
        chosen = tl.zeros((), tl.int32)
        temperature = tl.load(temperature_ptr + row)
        if status == 0:
            if temperature <= 0.0:
                token = best_chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(edited_row + token, mask=token < vocabulary, other=float("-inf"))
                chosen = best_chunk * CHUNK + tl.argmax(x, axis=0)
            else:
                floor = lowest_of(min_p_ptr, row, peak)
                top_k = tl.load(top_k_ptr + row)
                top_p = tl.load(top_p_ptr + row)
                cut = (top_k > 0) & (top_k < vocabulary)
                if cut:
                    limit = top_k.to(tl.float64)
                    floor = floor_of(edited_row, peaks_row, floor, peak, limit, vocabulary, chunks, False, CHUNK)
                if top_p < 1.0:
                    # What the filters before left: logits at the floor itself are still in.
                    below = float_of(tl.maximum(ordered(floor), -2139095040) - 1)
                    total, _, _ = count_above(
                        edited_row, peaks_row, below, below, below, vocabulary, chunks, peak, True, CHUNK
                    )
                    limit = total * top_p.to(tl.float64)
                    floor = floor_of(edited_row, peaks_row, floor, peak, limit, vocabulary, chunks, True, CHUNK)
                if cut | (top_p < 1.0):
                    masses = tl.zeros((BLOCK_CHUNKS,), tl.float64)
                    for chunk in tl.range(0, chunks):
                        if tl.load(peaks_row + chunk) >= floor:
                            kept = masses_of(edited_row, chunk, floor, peak, vocabulary, CHUNK)
                            masses = tl.where(lane == chunk, tl.sum(kept, axis=0), masses)
                else:
                    masses = tl.load(masses_ptr + row * chunks + lane, mask=lane < chunks, other=0.0)
                total = tl.sum(masses, axis=0)
                number = uniform_of(
                    tl.load(seeds_ptr + row), position, tl.load(choices_ptr + row), tl.zeros((), tl.int32)
                )
                # Rounding could lift u * total to total, which no cumulated mass exceeds.
                target = tl.minimum(number * total, total * (1.0 - 1.1102230246251565e-16))
                ends = tl.cumsum(masses, axis=0)
                chunk = tl.min(tl.where((ends > target) & (masses > 0.0), lane, BLOCK_CHUNKS), axis=0)
                # The two orders of summing may differ in the last bit: then the last kept chunk or token is meant.
                chunk = tl.minimum(chunk, tl.max(tl.where(masses > 0.0, lane, 0), axis=0))
                before = tl.sum(tl.where(lane == chunk, ends - masses, 0.0), axis=0)
                token = chunk * CHUNK + tl.arange(0, CHUNK)
                kept = masses_of(edited_row, chunk, floor, peak, vocabulary, CHUNK)
                passed = (before + tl.cumsum(kept, axis=0) > target) & (kept > 0.0)
                first = tl.min(tl.where(passed, token, vocabulary), axis=0)
                last = tl.max(tl.where(kept > 0.0, token, 0), axis=0)
                chosen = tl.minimum(first, last)
            penalty_row = tl.load(penalty_rows_ptr + row).to(tl.int64)
            if penalty_row >= 0:
                place = counts_ptr + penalty_row * vocabulary + chosen
                tl.store(place, tl.load(place) + 1)
        tl.store(tokens_ptr + row, chosen)
        tl.store(status_ptr + row, status)


_MODULE = "deepseek_engine.kernels.sampling_triton"
SAMPLE_EDIT = Table(
    Kernel(
        name="sample_edit",
        entry=f"{_MODULE}:sample_edit_kernel",
        signature={
            "logits_ptr": "*fp32",
            "edited_ptr": "*fp32",
            "peaks_ptr": "*fp32",
            "faults_ptr": "*i32",
            "temperature_ptr": "*fp32",
            "repetition_ptr": "*fp32",
            "frequency_ptr": "*fp32",
            "presence_ptr": "*fp32",
            "penalty_rows_ptr": "*i32",
            "counts_ptr": "*i32",
            "prompt_ptr": "*i8",
            "mask_rows_ptr": "*i32",
            "masks_ptr": "*u8",
            "edit_starts_ptr": "*i32",
            "edit_tokens_ptr": "*i32",
            "edit_values_ptr": "*fp32",
            "logits_stride": "i32",
            "mask_stride": "i32",
            "vocabulary": "i32",
            "chunks": "i32",
        },
        constants=("CHUNK",),
        divisible=frozenset(("edited_ptr",)),
        chained=True,
    ),
    (Variant("sample_edit", "chunk4096", {"CHUNK": 4096}, num_warps=8, num_stages=1),),
)
SAMPLE_MASS = Table(
    Kernel(
        name="sample_mass",
        entry=f"{_MODULE}:sample_mass_kernel",
        signature={
            "edited_ptr": "*fp32",
            "peaks_ptr": "*fp32",
            "masses_ptr": "*fp64",
            "temperature_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "positions_ptr": "*i32",
            "vocabulary": "i32",
            "chunks": "i32",
        },
        constants=("CHUNK", "BLOCK_CHUNKS"),
        divisible=frozenset(("edited_ptr",)),
        chained=True,
    ),
    (
        Variant(
            "sample_mass",
            "chunk4096",
            {"CHUNK": 4096, "BLOCK_CHUNKS": 64},
            num_warps=8,
            num_stages=1,
            when={"vocabulary": (1, 64 * 4096)},
        ),
    ),
)
SAMPLE_DRAW = Table(
    Kernel(
        name="sample_draw",
        entry=f"{_MODULE}:sample_draw_kernel",
        signature={
            "edited_ptr": "*fp32",
            "peaks_ptr": "*fp32",
            "faults_ptr": "*i32",
            "masses_ptr": "*fp64",
            "tokens_ptr": "*i64",
            "status_ptr": "*i32",
            "temperature_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "seeds_ptr": "*i64",
            "choices_ptr": "*i32",
            "positions_ptr": "*i32",
            "penalty_rows_ptr": "*i32",
            "counts_ptr": "*i32",
            "vocabulary": "i32",
            "chunks": "i32",
        },
        constants=("CHUNK", "BLOCK_CHUNKS"),
        divisible=frozenset(("edited_ptr",)),
        chained=True,
    ),
    (
        Variant(
            "sample_draw",
            "chunk4096",
            {"CHUNK": 4096, "BLOCK_CHUNKS": 64},
            num_warps=8,
            num_stages=1,
            when={"vocabulary": (1, 64 * 4096)},
        ),
    ),
)
TABLES = (SAMPLE_EDIT, SAMPLE_MASS, SAMPLE_DRAW)
PLAN = LaunchPlan(
    "sample",
    (
        Step("sample_edit", ("rows", "ceil_div(vocabulary, CHUNK)")),
        Step("sample_mass", ("rows", "ceil_div(vocabulary, CHUNK)")),
        Step("sample_draw", ("rows",)),
    ),
    workspaces={
        "edited": "4 * rows * vocabulary",
        "peaks": "4 * rows * ceil_div(vocabulary, CHUNK)",
        "faults": "4 * rows * ceil_div(vocabulary, CHUNK)",
        "masses": "8 * rows * ceil_div(vocabulary, CHUNK)",
    },
)
PLANS = (PLAN,)


@dataclass(slots=True)
class SamplingRows:
    """A batch's parameters on the device, [R] each; a graph's replays refill them."""

    temperature: Tensor
    """float32; 0 takes the largest logit."""
    min_p: Tensor
    top_k: Tensor
    """int32; 0 or less keeps all."""
    top_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    seeds: Tensor
    """int64: the bits of an unsigned 64-bit seed."""
    choices: Tensor
    positions: Tensor
    """int32: output tokens so far; below 0 for a padded row, of which nothing is written."""
    penalty_rows: Tensor
    """int32: row of `counts` and `prompt`, or -1."""
    counts: Tensor
    """int32 [P, V]: occurrences in the output; the drawn token's is raised."""
    prompt: Tensor
    """int8 [P, V]: whether the prompt has the token."""
    mask_rows: Tensor
    """int32: row of `masks`, or -1."""
    masks: Tensor
    """uint8 [M, ceil(V / 8)]: bit token % 8 of byte token / 8 allows the token."""
    edit_starts: Tensor
    """int32 [R + 1]: row r owns edits edit_starts[r] : edit_starts[r + 1]."""
    edit_tokens: Tensor
    edit_values: Tensor
    """float32, added to the token's logit: a bias, or -inf to forbid it (min_tokens)."""


SOUND, NOT_NUMBERS, NOTHING_LEFT = 0, 1, 2


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Draw a token a row.

    logits float32 [R, V], left as they are. Returns tokens int64 [R] and status int32 [R]: SOUND, NOT_NUMBERS (the
    model's logits hold NaN or +inf) or NOTHING_LEFT (masks and biases allow no token); then the token is 0.
    """
    count, vocabulary = logits.shape
    device = logits.device
    dims = {"rows": count, "vocabulary": vocabulary}
    probe = torch.empty(0, dtype=torch.bfloat16, device=device)
    edit, mass, draw = (require(table, probe, dims) for table in TABLES)
    chunks = ceil_div(vocabulary, edit.constants["CHUNK"])
    shared: dict[str, Tensor | int | float] = {
        "edited_ptr": torch.empty(count, vocabulary, dtype=torch.float32, device=device),
        "peaks_ptr": torch.empty(count, chunks, dtype=torch.float32, device=device),
        "faults_ptr": torch.empty(count, chunks, dtype=torch.int32, device=device),
        "masses_ptr": torch.empty(count, chunks, dtype=torch.float64, device=device),
        "min_p_ptr": rows.min_p,
        "top_k_ptr": rows.top_k,
        "top_p_ptr": rows.top_p,
        "positions_ptr": rows.positions,
        "temperature_ptr": rows.temperature,
        "penalty_rows_ptr": rows.penalty_rows,
        "counts_ptr": rows.counts,
        "vocabulary": vocabulary,
        "chunks": chunks,
    }
    launcher.launch(
        SAMPLE_EDIT.kernel,
        edit,
        PLAN.steps[0].blocks(dims, edit),
        shared
        | {
            "logits_ptr": logits,
            "repetition_ptr": rows.repetition,
            "frequency_ptr": rows.frequency,
            "presence_ptr": rows.presence,
            "prompt_ptr": rows.prompt,
            "mask_rows_ptr": rows.mask_rows,
            "masks_ptr": rows.masks,
            "edit_starts_ptr": rows.edit_starts,
            "edit_tokens_ptr": rows.edit_tokens,
            "edit_values_ptr": rows.edit_values,
            "logits_stride": logits.stride(0),
            "mask_stride": rows.masks.stride(0),
        },
    )
    launcher.launch(SAMPLE_MASS.kernel, mass, PLAN.steps[1].blocks(dims, mass), shared)
    tokens = torch.zeros(count, dtype=torch.int64, device=device)
    status = torch.zeros(count, dtype=torch.int32, device=device)
    launcher.launch(
        SAMPLE_DRAW.kernel,
        draw,
        PLAN.steps[2].blocks(dims, draw),
        shared
        | {
            "tokens_ptr": tokens,
            "status_ptr": status,
            "seeds_ptr": rows.seeds,
            "choices_ptr": rows.choices,
        },
    )
    return tokens, status
