"""The conformance kit: checks an algorithm's guarantees in one call.

from lightfed.testing import conformance

def test_ditto() -> None:
    conformance(partial(Ditto, lam=0.1))
"""

from lightfed.testing.conformance import conformance

__all__ = ["conformance"]
