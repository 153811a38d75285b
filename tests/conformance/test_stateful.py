"""The kit's promises, of algorithms whose clients keep their state from round to round."""

import pytest

from tests.conformance.kit import Digests, check_ranks, check_resumed, digests_of, names

NAMES = names(stateful=True)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    return digests_of(NAMES, tmp_path_factory.mktemp("stateful"))


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_ranks_gives_the_same_bits(name: str, digests: Digests) -> None:
    check_ranks(name, digests)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_on_other_ranks_has_the_bits_of_one_that_never_stopped(
    name: str, digests: Digests
) -> None:
    check_resumed(name, digests)
