"""What a router says that it has taken, as versions read it."""

import os
from pathlib import Path

import pytest
from piccard_contract.receipts import ReceiptReader, Receipts, receipts_path

ME = os.getpid()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return receipts_path(tmp_path / "run" / "router.2.lock")


def test_a_version_reads_what_a_router_took(path: Path) -> None:
    receipts, reader = Receipts(path), ReceiptReader()
    first, second = receipts.open(), receipts.open()
    assert path.name == "router.2.receipts"
    assert first.slot is not None
    assert second.slot is not None
    for _ in range(3):
        first.took()
    second.took()

    assert reader.taken(path, ME, first.slot) == 3
    assert reader.taken(path, ME, second.slot) == 1


def test_a_slot_begins_anew(path: Path) -> None:
    receipts, reader = Receipts(path, slots=1), ReceiptReader()
    first = receipts.open()
    first.took()
    first.close(whole=True)
    second = receipts.open()

    assert second.slot == 0
    assert reader.taken(path, ME, 0) == 0


def test_a_call_that_was_left_is_waited_for_by_nobody(path: Path) -> None:
    receipts, reader = Receipts(path, slots=1), ReceiptReader()
    left = receipts.open()
    left.close(whole=False)

    assert reader.taken(path, ME, 0) == 2**64 - 1
    # Another call in its slot would mislead the version.
    other = receipts.open()
    assert other.slot is None
    other.took()
    other.close(whole=True)
    assert reader.taken(path, ME, 0) == 2**64 - 1


def test_a_new_process_has_a_file_of_its_own(path: Path) -> None:
    reader, old = ReceiptReader(), Receipts(path)
    receipt = old.open()
    receipt.took()
    assert receipt.slot is not None
    assert reader.taken(path, ME, receipt.slot) == 1
    assert reader.taken(path, ME + 1, receipt.slot) is None

    new = Receipts(path)
    receipt.took()
    assert ReceiptReader().taken(path, ME, receipt.slot) == 0
    assert new.open().slot == receipt.slot


def test_what_cannot_be_read_tells_nothing(path: Path) -> None:
    reader = ReceiptReader()
    assert reader.taken(path, ME, 0) is None
    path.parent.mkdir()
    for content in (b"", b"short", b"x" * 100):
        path.write_bytes(content)
        assert reader.taken(path, ME, 0) is None
    path.unlink()
    Receipts(path, slots=2)
    assert [reader.taken(path, ME, slot) for slot in (-1, 0, 1, 2, 10**9)] == [None, 0, 0, None, None]
