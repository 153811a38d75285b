"""Interpret a program whose number is beyond what a test can run up to."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def program(number: int) -> Iterator[None]:
    """A launch of one program in here runs as program `number`."""
    from triton.runtime.interpreter import interpreter_builder

    original = interpreter_builder.set_grid_idx
    interpreter_builder.set_grid_idx = lambda x, y, z: setattr(
        interpreter_builder, "grid_idx", (x + number, y, z)
    )
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = original
