"""Which rows of which sequences are measured."""

from __future__ import annotations

from attnwatch.hooks.statistics import sample_rows, sample_sequences


def test_rows_spread_evenly_and_shift_with_the_phase() -> None:
    assert sample_rows(10, 5, 0.0) == [0, 2, 4, 6, 8]
    assert sample_rows(10, 5, 0.5) == [1, 3, 5, 7, 9]
    assert sample_rows(10, 4, 0.9) == [2, 4, 7, 9]
    assert sample_rows(3, 5, 0.9) == [0, 1, 2]
    assert sample_rows(3, None, 0.9) == [0, 1, 2]


def test_sequences_take_turns() -> None:
    assert [sample_sequences(5, 2, turn) for turn in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert sample_sequences(2, 4, 7) == [0, 1]
    assert sample_sequences(3, None, 7) == [0, 1, 2]
