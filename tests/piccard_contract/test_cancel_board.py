"""What routers cancel, as versions read it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.cancel_board import BoardReader, CancelBoard, board_path

SLOTS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return board_path(tmp_path / "run" / "router.2.lock")


def test_a_token_is_read_once_and_by_every_reader(path: Path) -> None:
    board, first, second = CancelBoard(path), BoardReader(path.parent), BoardReader(path.parent)
    assert path.name == "router.2.cancels"
    board.post("1.a")
    assert first.posted(["1.b", "1.a"]) == ["1.a"]
    assert first.posted(["1.a"]) == []
    assert second.posted(["1.a"]) == ["1.a"]
    # It holds no token that somebody could read and send.
    assert b"1.a" not in path.read_bytes()


def test_all_routers_are_read_and_one_that_was_started_again_begins_anew(path: Path) -> None:
    reader = BoardReader(path.parent)
    assert reader.posted(["a"]) == []
    old, other = CancelBoard(path), CancelBoard(path.with_name("router_unary.cancels"))
    old.post("a")
    other.post("b")
    assert sorted(reader.posted("abc")) == ["a", "b"]
    CancelBoard(path).post("c")
    # The process before it is dead, and what it still holds nobody reads.
    old.post("b")
    assert reader.posted("abc") == ["c"]


@given(st.lists(st.lists(st.integers(0, 9), max_size=2 * SLOTS), max_size=6))
def test_a_reader_gets_the_newest_that_the_board_holds(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[list[int]]
) -> None:
    path = board_path(tmp_path_factory.mktemp("board") / "router.lock")
    board, reader = CancelBoard(path, SLOTS), BoardReader(path.parent)
    tokens = [str(number) for number in range(10)]
    for posted in rounds:
        for number in posted:
            board.post(str(number))
        assert set(reader.posted(tokens)) == {str(number) for number in posted[-SLOTS:]}


def test_what_is_no_board_tells_nothing(path: Path) -> None:
    reader = BoardReader(path.parent)
    path.parent.mkdir()
    for content in (b"", b"short", b"x" * 100, b"PICCARDB" + bytes(56)):
        path.write_bytes(content)
        assert reader.posted(["a"]) == []
    path.unlink()
    CancelBoard(path).post("a")
    assert reader.posted(["a"]) == ["a"]
