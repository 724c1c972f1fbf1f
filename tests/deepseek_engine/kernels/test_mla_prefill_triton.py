import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random, relative_error
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import mla_prefill_triton as kernels

pytestmark = needs_device
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SCALE = 0.15


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)


def make(
    queries: list[int], keys: list[int], heads: int, widths: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    nope, value, rotary = widths
    tokens, context = sum(queries), sum(keys)
    projected = random(context, 64 + rotary, dtype=dtype, seed=3)
    return (
        random(tokens, heads, nope + rotary, dtype=dtype, seed=1),
        random(context, heads, nope + value, dtype=dtype, seed=2),
        projected[:, 64:],
    )


def exact_attention(
    q: Tensor, kv: Tensor, k_pe: Tensor, queries: list[int], keys: list[int], *, value: int, causal: bool
) -> tuple[Tensor, Tensor]:
    nope = kv.shape[-1] - value
    outs, lses = [], []
    for part, entries, shared in zip(q.split(queries), kv.split(keys), k_pe.split(keys), strict=True):
        part, entries, shared = part.double(), entries.double(), shared.double()
        scores = torch.einsum("thd,nhd->thn", part[..., :nope], entries[..., :nope])
        scores = (scores + torch.einsum("thr,nr->thn", part[..., nope:], shared)) * SCALE
        if causal:
            limit = torch.arange(len(entries) - len(part), len(entries), device=DEVICE)
            future = torch.arange(len(entries), device=DEVICE) > limit[:, None, None]
            scores = scores.masked_fill(future, float("-inf"))
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("thn,nhv->thv", scores.softmax(-1).nan_to_num(0.0), entries[..., nope:]))
    return torch.cat(outs), torch.cat(lses)


def check(
    queries: list[int],
    keys: list[int],
    heads: int,
    widths: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    causal: bool,
    row: kernels.Variant | None = None,
) -> None:
    q, kv, k_pe = make(queries, keys, heads, widths, dtype)
    out, lse = kernels.mla_prefill(
        q,
        kv,
        k_pe,
        starts(queries),
        starts(keys),
        longest=max(queries),
        value_width=widths[1],
        scale=SCALE,
        causal=causal,
        row=row,
    )
    exact_out, exact_lse = exact_attention(q, kv, k_pe, queries, keys, value=widths[1], causal=causal)
    assert torch.isfinite(out).all()
    assert relative_error(out, exact_out) < TOLERANCE[dtype]
    seen = exact_lse.isfinite()
    assert (lse[~seen] == float("-inf")).all()
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_deepseek_widths(dtype: torch.dtype, causal: bool) -> None:
    check([150, 1, 37], [150, 70, 200], 2, (128, 128, 64), dtype, causal=causal)


@pytest.mark.parametrize("widths", [(16, 24, 16), (64, 64, 64), (48, 32, 32)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_other_widths(widths: tuple[int, int, int], causal: bool) -> None:
    check([65, 3], [65, 99], 3, widths, DTYPES[0], causal=causal)


@pytest.mark.parametrize("row", kernels.MLA_PREFILL.variants, ids=lambda row: row.name)
def test_every_row(row: kernels.Variant) -> None:
    if DEVICE.type == "cuda" and 90 not in row.architectures:
        pytest.skip("declared for another architecture")
    widths = tuple(row.constants[name] for name in ("NOPE", "VALUE", "ROTARY"))
    check([131, 5], [131, 90], 1, widths, DTYPES[1], causal=bool(row.constants["CAUSAL"]), row=row)


def test_queries_before_every_key_are_empty() -> None:
    check([40], [25], 2, (64, 64, 64), DTYPES[1], causal=True)


def test_a_row_without_keys_is_empty() -> None:
    check([4, 6], [0, 33], 2, (64, 64, 64), DTYPES[1], causal=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_cached_chunks_and_the_new_one_merge_to_the_whole(dtype: torch.dtype) -> None:
    new, cached, widths = 20, 75, (64, 64, 64)
    q, kv, k_pe = make([new], [cached + new], 2, widths, dtype)
    common = {"longest": new, "value_width": 64, "scale": SCALE}
    out, lse = kernels.mla_prefill(q, kv[cached:], k_pe[cached:], starts([new]), starts([new]), causal=True, **common)
    for chunk in (slice(0, 32), slice(32, 32), slice(32, 75)):
        keys = starts([chunk.stop - chunk.start])
        other = kernels.mla_prefill(q, kv[chunk], k_pe[chunk], starts([new]), keys, causal=False, **common)
        kernels.merge_attention(out, lse, *other)
    exact_out, exact_lse = exact_attention(q, kv, k_pe, [new], [cached + new], value=64, causal=True)
    assert relative_error(out, exact_out) < 2 * TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-3, atol=2e-3)


def test_merging_ignores_what_empty_parts_hold() -> None:
    out, other = random(3, 2, 64, dtype=DTYPES[1]), torch.full((3, 2, 64), float("nan"), dtype=DTYPES[1], device=DEVICE)
    lse = random(3, 2, seed=1)
    before = out.clone(), lse.clone()
    for empty in (float("-inf"), float("inf")):
        kernels.merge_attention(out, lse, other, torch.full((3, 2), empty, device=DEVICE))
        torch.testing.assert_close((out, lse), before, rtol=0, atol=1e-6)
    nothing = torch.full((3, 2), float("-inf"), device=DEVICE)
    kernels.merge_attention(other, nothing, other.clone(), nothing.clone())
    assert (other == 0).all()
    assert (nothing == float("-inf")).all()


@pytest.mark.gpu
def test_poison_past_the_keys_does_not_leak() -> None:
    q, kv, k_pe = make([70], [200], 16, (128, 128, 64), torch.bfloat16)
    kv[70:] = float("nan")
    k_pe[70:] = float("nan")
    common = {"longest": 70, "value_width": 128, "scale": SCALE, "causal": True}
    out, _ = kernels.mla_prefill(q, kv, k_pe, starts([70]), starts([70]), **common)
    exact, _ = exact_attention(q, kv[:70], k_pe[:70], [70], [70], value=128, causal=True)
    assert relative_error(out, exact) < TOLERANCE[torch.bfloat16]
