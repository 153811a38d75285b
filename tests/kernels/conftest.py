"""The backend under test; what takes seconds in the interpreter is left to the matrix."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.kernels.backends import INTERPRETED, device

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


@pytest.fixture(scope="session", autouse=True)
def _no_check_that_is_thrown_away() -> Iterator[None]:
    """Let the interpreter not look for overflows, about which it would say nothing.

    It computes every operation on whole numbers once more in 64 bits. Then it drops the answer,
    unless kernels are run with debug=True. That is more than half of what these tests take.
    """
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    assert not options.debug
    interpreter_builder.options = replace(options, sanitize_overflow=False)
    yield
    interpreter_builder.options = options
