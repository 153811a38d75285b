"""What is read from a run folder, finished, running or damaged."""

from pathlib import Path

import numpy as np
import pytest

from lightfed.lab.report.page import build
from lightfed.lab.results.run import base_name, read
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import CLIENTS, ENVIRONMENT, EVALUATIONS, append, write_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    assert run.rounds.index.tolist() == [1, 2, 3]
    assert run.series("train_loss").tolist() == [2.0, 1.0, 0.5]
    np.testing.assert_array_equal(run.series("global/accuracy"), [0.5, np.nan, 0.75])
    assert run.evaluation.index.tolist() == [0, 1, 2, 3]
    assert run.evaluation["round"].unique().tolist() == [3]
    assert run.evaluation["accuracy"].tolist() == [1.0, 0.8, 0.5, 0.3]
    assert run.clients[["round", "client"]].to_numpy().tolist() == [
        *([1, client] for client in range(4)),
        *([3, client] for client in range(4)),
    ]
    assert run.partition is not None
    assert run.partition.shape == (4, 3)
    assert run.partition.columns.tolist() == ["zero", "one", "two"]
    assert (run.name, run.client_groups, run.num_clients) == ("known", ("a", "b"), 4)


@pytest.mark.parametrize(
    ("kept", "text", "seen"),
    [
        (8, "4,0,a,30,0.9,0.1,1,1,1\r\n4,1,a,20,0.9", [3, 3, 3, 3]),
        (2, "1,2,b", [1, 1]),  # the first one counts as far as it goes
        (0, "", []),
    ],
)
def test_of_a_round_that_is_being_written_nothing_is_read(
    kept: int, text: str, seen: list[int], tmp_path: Path
) -> None:
    """An evaluation gives way to the one before it."""
    folder = write_run(tmp_path / "run", evaluations=EVALUATIONS[:kept] or None)
    append(folder / "clients.csv", text or CLIENTS)
    append(folder / "metrics.csv", "4,0.25,0.9,1.0,0.7,0.1,0.5,0.9,0.95,0.4,1000,2000,4e9,0,4,0,1.")
    run = read(folder)
    assert run.rounds.index.tolist() == [1, 2, 3]
    assert len(run.evaluation) == len(seen)
    assert not seen or run.evaluation["round"].tolist() == seen


def test_only_the_metrics_have_to_be_there(tmp_path: Path) -> None:
    run = read(
        write_run(tmp_path / "bare", environment=None, config=None, evaluations=None, counts=None)
    )
    assert (run.name, len(run.evaluation), run.partition, run.config) == ("bare", 0, None, "")
    assert run.num_clients is None
    assert run.client_groups == ()
    assert np.isnan(run.series("no such column")).all()


def test_a_quoted_client_group_name_may_hold_a_comma_and_a_slash(tmp_path: Path) -> None:
    metrics = {"personal/accuracy": (0.5,), "personal/accuracy/wide, 1/2": (0.5,)}
    rows = [(1, 0, "wide, 1/2", 3, 0.5, 1.0, 1, 1, 1)]
    stated = ENVIRONMENT | {"groups": {"wide, 1/2": 1, "narrow": 3}}
    run = read(write_run(tmp_path / "run", metrics=metrics, evaluations=rows, environment=stated))
    assert run.client_groups == ("wide, 1/2", "narrow")
    assert [*dict.fromkeys(map(base_name, run.metrics))] == ["accuracy"]


def test_client_groups_are_those_that_the_run_recorded_and_no_part_of_a_name(
    tmp_path: Path,
) -> None:
    """`val/acc` is what users of Lightning write."""
    metrics = {
        "train/acc": (0.5,), "global/val/acc": (0.5,), "personal/val/acc": (0.5,),
        "personal/val/acc_std": (0.1,), "personal/val/acc/a": (0.75,),
        "personal/val/acc/b": (0.25,), "personal/val/loss": (0.5,),
    }  # fmt: skip
    run = read(write_run(tmp_path / "run", metrics=metrics, evaluations=None))
    assert run.client_groups == ("a", "b")
    assert [*dict.fromkeys(map(base_name, run.metrics))] == ["val/acc", "val/loss"]
    alone = {k: v for k, v in metrics.items() if not k.endswith(("/a", "/b"))}
    stated = ENVIRONMENT | {"groups": {"acc": 4}}  # the name of the only one
    run = read(write_run(tmp_path / "alone", metrics=alone, environment=stated, evaluations=None))
    assert run.client_groups == ("acc",)
    assert {*map(base_name, run.metrics)} == {"val/acc", "val/loss"}


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("metrics.csv", None, "holds no metrics.csv"),
        ("metrics.csv", "round,train_loss\n1,0.5", "no finished round"),
        ("metrics.csv", "epoch,train_loss\n1,0.5\n", "no numbers in column round"),
        ("metrics.csv", "round,loss\n1,0.5\n2,much\n", "no numbers in column loss"),
        ("metrics.csv", "round,loss\n1,0.5\n2,0.5,3\n", "metrics.csv cannot be read"),
        ("clients.csv", f"{CLIENTS}\n1,0,a,x,1,1,1,1,1\n", "clients.csv cannot be read"),
        ("environment.json", '{"seed": ', "environment.json cannot be read"),
        ("partition.npz", "", "partition.npz cannot be read"),
    ],
)
def test_damage_is_one_error_that_names_the_file(
    tmp_path: Path, name: str, content: str | None, named: str
) -> None:
    path = write_run(tmp_path / "run") / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(UserError, match=r"^report: ") as caught:
        build(path.parent)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path.parent) in caught.value.found
    assert caught.value.fix
