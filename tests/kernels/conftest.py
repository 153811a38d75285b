"""The backend under test; what takes seconds in the interpreter is left to the matrix."""

import pytest

from tests.kernels.backends import device

__all__ = ["device"]

# The other backends take them in the default tier, and the interpreter the smaller ones.
_LONG_INTERPRETED = (
    "transformer_abcde",
    "conv_nonorm",
    "conv_noniid_abcde",
    "conv_iid_abcde-True",
    "test_the_same_bits_twice",
    "resnet18_iid_aeec",
    "test_golden_dispfl_fire",
    "-16]",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "[interpreter" in item.nodeid and any(part in item.nodeid for part in _LONG_INTERPRETED):
            item.add_marker(pytest.mark.matrix)
