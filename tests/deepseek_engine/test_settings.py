"""Engine settings and profiles refuse what cannot work and say why."""

import pytest
from deepseek_engine.profiles import PROFILES, profile
from deepseek_engine.settings import EngineSettings
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 8},
        {"num_blocks": 0},
        {"cache_bytes": 0},
        {"max_num_seqs": 0},
        {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        {"prefill_chunk": 0},
        {"prefill_gap": 1.0},
        {"max_model_len": 0},
    ],
)
def test_contradictions_are_named(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        EngineSettings(**changes)


@given(st.integers(1, 10_000), st.sampled_from([16, 32, 64]), st.integers(1, 2**24))
def test_the_cache_stays_within_its_bytes(bytes_per_token, block_size, cache_bytes):
    settings = EngineSettings(block_size=block_size, cache_bytes=cache_bytes)
    block = bytes_per_token * block_size
    if block > cache_bytes:
        with pytest.raises(ValueError, match="cache_bytes"):
            settings.blocks_for(bytes_per_token)
    else:
        blocks = settings.blocks_for(bytes_per_token)
        assert blocks * block <= cache_bytes < (blocks + 1) * block


def test_num_blocks_beats_cache_bytes():
    assert EngineSettings(num_blocks=7, cache_bytes=1).blocks_for(10**9) == 7


@pytest.mark.parametrize(
    ("wanted", "positions", "blocks", "context"), [(None, 100, 10, 100), (None, 200, 10, 160), (50, 100, 10, 50)]
)
def test_the_context_is_what_model_and_cache_have(wanted, positions, blocks, context):
    assert EngineSettings(max_model_len=wanted).context_for(positions, blocks) == context


@pytest.mark.parametrize(("positions", "blocks", "word"), [(100, 100, "positions"), (1000, 10, "cache")])
def test_a_context_beyond_model_or_cache_is_refused(positions, blocks, word):
    with pytest.raises(ValueError, match=word):
        EngineSettings(max_model_len=500).context_for(positions, blocks)


def test_profiles_differ_and_take_changes():
    assert {"balanced", "latency", "throughput"} == set(PROFILES)
    assert len(set(PROFILES.values())) == 3
    changed = profile("latency", num_blocks=9)
    assert changed.num_blocks == 9
    assert changed.prefill_chunk == PROFILES["latency"].prefill_chunk


def test_unknown_profiles_and_fields_are_named():
    with pytest.raises(ValueError, match=r"'fast'.*balanced"):
        profile("fast")
    with pytest.raises(ValueError, match=r"blocksize.*block_size"):
        profile("balanced", blocksize=16)
