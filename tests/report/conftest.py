"""Pictures are drawn only for tests that look at them: those that ask for `drawn`."""

import pytest


@pytest.fixture
def drawn() -> None:
    """Pictures are the real ones."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> None:
    if "drawn" not in request.fixturenames:
        request.getfixturevalue("undrawn")
