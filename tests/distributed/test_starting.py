"""A launcher's ranks are those that are configured."""

import pytest

from lightfed.distributed.slurm import check_rank
from lightfed.utils.errors import UserError


def test_a_rank_that_is_not_configured_is_refused() -> None:
    check_rank(1, 2)
    with pytest.raises(UserError) as refused:
        check_rank(2, 2)
    assert refused.value.key == "LOCAL_RANK"
