import os
import time
from pathlib import Path

import pytest

from megarl.tracing.board import BOARD, GROUPS, SPANS, Board, find_file, read_board


@pytest.fixture
def board():
    board = Board(7)
    yield board
    board.close()


def test_board_shows_open_spans(board):
    now = time.monotonic_ns()
    board.push("update_actor", now)
    board.push("forward number=2", now + 5)
    content = read_board(os.getpid())
    assert content is not None
    assert [(one.name, one.since_ns) for one in content.spans] == [("update_actor", now), ("forward number=2", now + 5)]
    board.pop()
    content = read_board(os.getpid())
    assert content is not None and [one.name for one in content.spans] == ["update_actor"]


def test_board_names_the_thread_of_its_spans(board):
    before = read_board(os.getpid())
    board.follow(2**47 + 1)
    after = read_board(os.getpid())
    assert before is not None and after is not None and (before.thread, after.thread) == (7, 2**47 + 1)


def test_board_shows_latest_group_counts(board):
    board.issue("tensor [0, 1]", "all_reduce", 1)
    board.issue("data [0, 2]", "barrier", 1)
    board.issue("tensor [0, 1]", "all_gather", 2)
    content = read_board(os.getpid())
    assert content is not None
    assert {group: (one.issued, one.last) for group, one in content.counts.items()} == {
        "tensor [0, 1]": (2, "all_gather"),
        "data [0, 2]": (1, "barrier"),
    }


def test_overflow_is_dropped_and_long_names_are_cut(board):
    for depth in range(SPANS + 3):
        board.push(f"{depth} " + "ü" * 200, depth)
    for number in range(GROUPS + 3):
        board.issue(f"group {number}", "barrier", 1)
    content = read_board(os.getpid())
    assert content is not None and len(content.spans) == SPANS and len(content.counts) == GROUPS
    assert content.spans[-1].name.startswith(f"{SPANS - 1} ü")
    for _ in range(4):
        board.pop()
    content = read_board(os.getpid())
    assert content is not None and len(content.spans) == SPANS - 1


def test_process_without_a_board():
    assert read_board(os.getpid()) is None
    assert find_file(2**22 + 1, BOARD) is None


def test_a_board_is_found_while_descriptors_are_closed(board):
    """One is closed between the listing and the look at it."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    readlink = os.readlink

    def close_and_read(path):
        if Path(path).name == str(descriptor):
            os.close(descriptor)
        return readlink(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readlink", close_and_read)
        patch.setattr(os, "listdir", lambda folder: [str(descriptor), str(board._fd)])
        found = find_file(os.getpid(), BOARD)
    assert found is not None and found.name == str(board._fd)
