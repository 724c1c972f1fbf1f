import pytest
import torch
from device_kernels import DEVICE, DTYPES, dtype_name, needs_device, random, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from deepseek_engine.kernels import block_masks as masks
from deepseek_engine.kernels import block_sparse_attention_triton as kernels
from deepseek_engine.kernels.block_map import BlockMap, block_map
from deepseek_engine.kernels.block_masks import Mask, MaskFunction
from deepseek_engine.kernels.block_sparse_attention import block_sparse_attention as reference
from deepseek_engine.kernels.dispatch import NoVariantError

pytestmark = needs_device
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SCALE = 0.15
WIDTHS = [(64, 64, 0), (128, 128, 0), (128, 128, 64)]


def make(
    batches: int, queries: int, keys: int, heads: tuple[int, int], widths: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys and values are columns of one matrix, as DeepSeek's kv_b makes them."""
    width, value, rotary = widths
    both = random(batches, keys, heads[1], width + value, dtype=dtype, seed=2)
    return (
        random(batches, queries, heads[0], width + rotary, dtype=dtype, seed=1),
        both[..., :width],
        both[..., width:],
        random(batches, keys, 64 + rotary, dtype=dtype, seed=3)[..., 64:] if rotary else None,
    )


def mapped(
    mask: Mask | MaskFunction,
    queries: int,
    keys: int,
    maps: tuple[int, int] = (1, 1),
    tile: tuple[int, int] | None = None,
) -> BlockMap:
    block_queries, block_keys = tile or kernels.tile(DEVICE)
    return block_map(
        mask,
        queries=queries,
        keys=keys,
        block_queries=block_queries,
        block_keys=block_keys,
        batches=maps[0],
        heads=maps[1],
        device=DEVICE,
    )


def check(
    mask: Mask | MaskFunction,
    *,
    queries: int,
    keys: int,
    widths: tuple[int, int, int] = (64, 64, 0),
    batches: int = 1,
    heads: tuple[int, int] = (1, 1),
    maps: tuple[int, int] = (1, 1),
    dtype: torch.dtype = DTYPES[0],
    row: kernels.Variant | None = None,
) -> None:
    q, k, v, k_pe = make(batches, queries, keys, heads, widths, dtype)
    tile = None if row is None else (row.constants["BLOCK_QUERIES"], row.constants["BLOCK_KEYS"])
    blocks = mapped(mask, queries, keys, maps, tile)
    out, lse = kernels.block_sparse_attention(q, k, v, blocks, SCALE, k_pe=k_pe, row=row)
    wide = None if k_pe is None else k_pe.double()
    exact_out, exact_lse = reference(q.double(), k.double(), v.double(), mask, SCALE, k_pe=wide)
    assert torch.isfinite(out).all()
    assert relative_error(out, exact_out) < TOLERANCE[dtype]
    seen = exact_lse.isfinite()
    assert (lse[~seen] == float("-inf")).all()
    assert (out[~seen] == 0).all()
    torch.testing.assert_close(lse.double()[seen], exact_lse[seen], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths(widths: tuple[int, int, int], dtype: torch.dtype) -> None:
    mask = masks.first_queries_and_window(300, width=70) & masks.Causal(37)
    check(mask, queries=300, keys=337, widths=widths, dtype=dtype)


@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(),
        masks.Window(64) & masks.Causal(),
        masks.first_queries_and_window(400, width=50),
        masks.global_tokens_and_window(70, width=33),
        masks.global_tokens_and_window(70, width=33) & masks.Causal(),
    ],
    ids=["causal", "band", "first_queries", "global_tokens", "causal_global_tokens"],
)
def test_masks(mask: Mask) -> None:
    check(mask, queries=400, keys=400, batches=2, heads=(2, 1))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_the_top_blocks_of_real_scores(causal: bool) -> None:
    queries, heads = 400, (4, 2)
    q, k, _, k_pe = make(2, queries, queries, heads, (128, 128, 64), DTYPES[0])
    block_queries, block_keys = kernels.tile(DEVICE)
    mask: Mask = masks.top_blocks(q, k, 2, block_queries=block_queries, block_keys=block_keys, k_pe=k_pe, causal=causal)
    if causal:
        mask = mask & masks.Causal()
    check(mask, queries=queries, keys=queries, widths=(128, 128, 64), batches=2, heads=heads, maps=(2, heads[0]))


def test_a_mask_of_batch_head_query_and_key() -> None:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query * 7 + key * (head + 2) + batch) % 5 < 2

    check(mask, queries=150, keys=90, batches=2, heads=(4, 2), maps=(2, 4))


@pytest.mark.parametrize("row", kernels.BLOCK_SPARSE_ATTENTION.variants, ids=lambda row: row.name)
def test_every_row(row: kernels.Variant) -> None:
    if DEVICE.type == "cuda" and 90 not in row.architectures:
        pytest.skip("declared for another architecture")
    widths = tuple(row.constants[name] for name in ("WIDTH", "VALUE", "ROTARY"))
    check(masks.Window(90) & masks.Causal(), queries=261, keys=261, widths=widths, dtype=DTYPES[1], row=row)


@settings(max_examples=12)
@given(
    queries=st.integers(1, 260),
    keys=st.integers(1, 260),
    block=st.tuples(st.sampled_from([1, 16, 64, 96, 128]), st.sampled_from([1, 32, 64, 128])),
    density=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_random_masks(queries: int, keys: int, block: tuple[int, int], density: float, seed: int) -> None:
    rows, columns = -(-queries // block[0]), -(-keys // block[1])
    chosen = torch.rand(1, 2, rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    mask = masks.ChosenBlocks(chosen.to(DEVICE), *block)
    check(mask, queries=queries, keys=keys, heads=(2, 2), maps=(1, 2))


def test_queries_without_keys_are_empty() -> None:
    check(lambda b, h, q, k: (q % 3 > 0) & (q > 140) & (k <= q), queries=280, keys=280)
    check(lambda b, h, q, k: (q < 0) & (k < 0), queries=130, keys=65)
    q, k, v, _ = make(1, 130, 0, (2, 1), (64, 64, 0), DTYPES[1])
    out, lse = kernels.block_sparse_attention(q, k, v, mapped(masks.Causal(), 130, 0), SCALE)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_a_key_of_192_in_one_piece_is_taken_in_two() -> None:
    q, k, v = (random(1, 130, 2, width, dtype=DTYPES[0], seed=width) for width in (192, 192, 128))
    blocks = mapped(masks.Causal(), 130, 130)
    whole = kernels.block_sparse_attention(q, k, v, blocks, SCALE)
    parts = kernels.block_sparse_attention(q, k[..., :128], v, blocks, SCALE, k_pe=k[..., 128:])
    assert torch.equal(whole[0], parts[0])
    exact, _ = reference(q.double(), k.double(), v.double(), masks.Causal(), SCALE)
    assert relative_error(whole[0], exact) < TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("poisoned", ["absent blocks", "past the last key"])
def test_poison_where_nothing_is_seen_does_not_leak(poisoned: str) -> None:
    """Keys of absent blocks are never read, those past the last never used."""
    block_keys = kernels.tile(DEVICE)[1]
    keys = 3 * block_keys if poisoned == "absent blocks" else 3 * block_keys - 20
    q, k, v, _ = make(1, 100, 3 * block_keys, (1, 1), (64, 64, 0), DTYPES[1])
    hidden = slice(block_keys, 2 * block_keys) if poisoned == "absent blocks" else slice(keys, None)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key // block_keys != (1 if poisoned == "absent blocks" else 3)) & (query >= 0)

    clean = reference(q.double(), k[:, :keys].double(), v[:, :keys].double(), mask, SCALE)[0]
    k[:, hidden] = v[:, hidden] = float("nan")
    out, _ = kernels.block_sparse_attention(q, k[:, :keys], v[:, :keys], mapped(mask, 100, keys), SCALE)
    assert relative_error(out, clean) < TOLERANCE[DTYPES[1]]


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, _ = make(1, 64, 64, (4, 2), (64, 64, 0), DTYPES[1])
    blocks = mapped(masks.Causal(), 64, 64)
    with pytest.raises(ValueError, match="map is of 64 queries and 64 keys"):
        kernels.block_sparse_attention(q[:, :60], k, v, blocks, SCALE)
    with pytest.raises(ValueError, match="3 heads; 1 or 1, and 4 or 1 fit"):
        kernels.block_sparse_attention(q, k, v, mapped(masks.Causal(), 64, 64, (1, 3)), SCALE)
    with pytest.raises(ValueError, match="queries are 64 wide, keys 32"):
        kernels.block_sparse_attention(q, k[..., :32], v, blocks, SCALE)
    with pytest.raises(ValueError, match="differ in batch, keys or heads"):
        kernels.block_sparse_attention(q[:, :, :3], k, v, blocks, SCALE)
    with pytest.raises(ValueError, match="stride 1"):
        kernels.block_sparse_attention(q, k.mT.contiguous().mT, v, blocks, SCALE)
    with pytest.raises(NoVariantError, match="block_queries 32"):
        kernels.block_sparse_attention(q, k, v, mapped(masks.Causal(), 64, 64, tile=(32, 32)), SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_long_context(widths: tuple[int, int, int]) -> None:
    check(
        masks.first_queries_and_window(6000, width=512) & masks.Causal(),
        queries=6000,
        keys=6000,
        widths=widths,
        heads=(4, 2),
        dtype=torch.bfloat16,
    )
