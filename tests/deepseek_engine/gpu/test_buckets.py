import pytest
from deepseek_engine.gpu.buckets import bucket_of, decode_buckets, token_buckets
from hypothesis import given
from hypothesis import strategies as st

MOST = st.integers(1, 2048)


@given(MOST, st.sampled_from([decode_buckets, token_buckets]))
def test_buckets_rise_to_the_most_that_is_asked_for(most, buckets):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert sizes[0] >= 1


@given(MOST, st.data(), st.sampled_from([decode_buckets, token_buckets]))
def test_every_size_has_the_smallest_bucket_that_holds_it(most, data, buckets):
    sizes = buckets(most)
    size = data.draw(st.integers(1, most))
    bucket = bucket_of(sizes, size)
    assert bucket in sizes
    assert bucket >= size
    assert not [other for other in sizes if size <= other < bucket]


@given(MOST)
def test_what_is_larger_has_no_bucket(most):
    assert bucket_of(decode_buckets(most), most + 1) is None


@pytest.mark.parametrize("most", [1, 3, 8, 31, 64, 129, 256, 500, 512])
def test_a_decode_is_padded_by_little(most):
    sizes = decode_buckets(most)
    for size in range(1, most + 1):
        padding = bucket_of(sizes, size) - size
        if size <= 32:
            assert padding <= 3
        elif size <= 128:
            assert padding <= 7
        else:
            assert padding <= size / 8


@pytest.mark.parametrize("most", [512, 1024])
def test_graphs_are_few(most):
    assert len(decode_buckets(most)) <= 48
    assert len(token_buckets(most)) <= 14
