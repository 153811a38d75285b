"""The kit's promises, of algorithms whose clients keep their state from round to round."""

import pytest

from lightfed.testing.conformance import Digests, check, digests_of
from tests.promises.conformance.kit import plan_of

PLAN = plan_of(stateful=True)


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    return digests_of(PLAN, tmp_path_factory.mktemp("stateful"))


@pytest.mark.parametrize("name", PLAN.cases)
def test_ranks_and_resumed_runs_have_the_bits_of_one_rank(name: str, digests: Digests) -> None:
    check(PLAN, name, digests)
