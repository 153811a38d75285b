"""The kit's promises, of algorithms whose clients keep their state from round to round."""

import pytest

from lightfed.testing.conformance import Digests, check_ranks, check_resumed, digests_of
from tests.promises.conformance.kit import plan_of

PLAN = plan_of(stateful=True)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    return digests_of(PLAN, tmp_path_factory.mktemp("stateful"))


@pytest.mark.parametrize("name", PLAN.cases)
def test_two_ranks_give_the_bits_of_one(name: str, digests: Digests) -> None:
    check_ranks(PLAN, name, digests)


@pytest.mark.parametrize("name", PLAN.cases)
def test_a_run_resumed_on_other_ranks_has_the_bits_of_one_that_never_stopped(
    name: str, digests: Digests
) -> None:
    check_resumed(PLAN, name, digests)
