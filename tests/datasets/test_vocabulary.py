from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightfed.datasets.language import Vocabulary, fold
from lightfed.utils.errors import UserError


@given(length=st.integers(0, 200), rows=st.integers(1, 12), window=st.integers(1, 12))
def test_windows_are_runs_of_their_row(length: int, rows: int, window: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    if length // rows < window:
        with pytest.raises(UserError, match=r"^data\.dataset\.init_args\.window: "):
            fold(tokens, rows=rows, window=window)
        return
    windows = fold(tokens, rows=rows, window=window)
    per_row = length // rows // window
    assert windows.shape == (rows, per_row, window)
    for row in range(rows):
        for position in range(per_row):
            start = row * (length // rows) + position * window
            assert windows[row, position].tolist() == list(range(start, start + window))


@given(text=st.lists(st.lists(st.sampled_from("abcdef"), max_size=6)), least=st.integers(1, 4))
def test_a_vocabulary_numbers_the_frequent_words(text: list[list[str]], least: int) -> None:
    vocabulary = Vocabulary(text, least=least)
    counts = Counter(word for line in text for word in line)
    first = [word for word in counts if counts[word] >= least]  # in the order of the text
    assert vocabulary.words == ("<ukn>", "<eos>", *first)
    assert len(vocabulary) == len(first) + 2
    again = [vocabulary.words[number] for number in vocabulary.encode(text)]
    expected = [
        word if word in first or word == "<eos>" else "<ukn>"
        for line in text
        for word in [*line, "<eos>"]
    ]
    assert again == expected
