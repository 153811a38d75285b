"""A launcher's numbers are checked before torch reads them."""

import pytest

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.distributed.slurm import check_rank, check_variables
from lightfed.utils.errors import UserError
from lightfed.utils.process import LEAST


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("value", ["", "abc", "-1", "1.5", "12_3"])
def test_what_is_no_number_is_refused_by_the_rank_that_has_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        main(["fit", "--config", "nowhere.yaml"])
    assert left.value.code == USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lightfed: error: {name}: {value!r}; ")


def test_numbers_in_range_are_accepted() -> None:
    check_variables({name: str(least) for name, least in LEAST.items()})
    check_variables({"MASTER_PORT": "65535", "SLURM_RESTART_COUNT": "0"})
    for port in ("0", "65536"):
        with pytest.raises(UserError) as refused:
            check_variables({"MASTER_PORT": port})
        assert refused.value.key == "MASTER_PORT"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_torchrun_would_set_is_missed(name: str) -> None:
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    check_variables(given)
    with pytest.raises(UserError) as refused:
        check_variables({key: value for key, value in given.items() if key != name})
    assert refused.value.key == name


def test_a_rank_that_is_not_configured_is_refused() -> None:
    check_rank(1, 2)
    with pytest.raises(UserError) as refused:
        check_rank(2, 2)
    assert refused.value.key == "LOCAL_RANK"
