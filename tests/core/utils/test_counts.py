"""Shares of whole numbers, against exact fractions."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lightfed.networks.cnn import Conv
from lightfed.networks.layers import scaled
from lightfed.networks.mlp import MLP
from lightfed.utils.counts import rounded_down, rounded_up


@given(share=st.integers(0, 10_000), whole=st.integers(0, 10**6))
def test_a_share_is_rounded_as_it_is_written(share: int, whole: int) -> None:
    exact, product = Fraction(share, 10_000) * whole, share / 10_000 * whole
    assert rounded_up(product) == math.ceil(exact)
    assert rounded_down(product) == math.floor(exact)


def test_models_have_the_widths_that_are_written() -> None:
    assert scaled([100, 50], 0.07) == [7, 4]
    assert MLP(3, (4,), hidden=(100,), rate=0.07).layers[1].out_features == 7
    assert next(Conv(10, (1, 8, 8), hidden=(100,), rate=0.55).parameters()).shape[0] == 55
