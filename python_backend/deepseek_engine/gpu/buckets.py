"""The sizes for which graphs are captured."""

from bisect import bisect_left

_FINE = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def decode_buckets(most: int) -> list[int]:
    """Rows of a decode graph, up to `most`: padding is at most 3 of 32, 7 of 128, an eighth of more."""
    sizes = list(_FINE)
    step = 8
    while sizes[-1] < most:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    return [*(size for size in sizes if size < most), most]


def token_buckets(most: int) -> list[int]:
    """Tokens of a graph for short prompts and mixed steps, up to `most`."""
    sizes = [16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512]
    return [*(size for size in sizes if size < most), most]


def bucket_of(buckets: list[int], size: int) -> int | None:
    """The smallest bucket that holds `size`, or None."""
    place = bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else None
