"""The backend under test; what takes seconds in the interpreter is left to the matrix."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

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
def _nothing_in_vain() -> Iterator[None]:
    """Leave out what the interpreter does in vain, which is more than half of what it takes.

    It computes every operation on whole numbers once more in 64 bits, and throws the answer away
    unless kernels are run with debug=True. And for each launch it lists the members of Triton's
    language, which are always the same.
    """
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    options = builder.options
    assert not options.debug
    listed = SimpleNamespace(**vars(inspect) | {"getmembers": cache(inspect.getmembers)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", replace(options, sanitize_overflow=False))
        patch.setattr(interpreter, "inspect", listed)
        yield
