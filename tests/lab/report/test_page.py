"""The page of a run: its figures, what it does without, and that it stands alone."""

from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightfed.lab.drawing.markup import library
from lightfed.lab.report.page import build
from lightfed.utils.errors import UserError
from tests.lab.report.make_run import ENVIRONMENT, METRICS, append, write_run
from tests.lab.report.read_page import ReadPage


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the known run, with its page."""
    environment = ENVIRONMENT | {"experiment": {"digest": "0", "settings": {"model.a": "1"}}}
    folder = write_run(tmp_path_factory.mktemp("known") / "run", environment=environment)
    assert build(folder) == folder / "index.html"
    return folder


@pytest.fixture(scope="module")
def page(known: Path) -> ReadPage:
    return ReadPage(known / "index.html")


def test_the_cards_hold_the_final_figures(page: ReadPage) -> None:
    assert page.cards == {
        "rounds": ("3", ""),
        "global accuracy": ("75.00 %", "best 75.00 % in round 3"),
        "personal accuracy": ("65.00 %", "std over clients 26.93 %"),
        "worst 10 %": ("30.00 %", ""),
        "train loss": ("0.5", ""),
        "sent": ("9.00 kB", "3.00 kB up, 6.00 kB down"),
        "compute": ("12.0 GFLOPs", "3.00 GFLOPs per client"),
        "time / round": ("1.50 s", "4.50 s in all"),
    }
    assert "2 ranks, 1 of 12 sessions skipped" in page.texts["p"]


def test_what_clients_hold_is_not_the_global_model_on_their_data(tmp_path: Path) -> None:
    metrics = {
        **METRICS,
        "local/accuracy": (0.6, "", 0.95),
        "local/accuracy_std": (0.1, "", 0.05),
        "trained/accuracy": (0.2, "", 0.7),
    }
    said = {"personal": "its slice", "evaluate_at": "aggregated"}
    evaluations = [
        (3, k, client_group, 9, held, 1.0, shared, 1, 1, 1)
        for k, (client_group, held, shared) in enumerate([("a", 0.9, 0.9), ("b", 0.5, 0.98)])
    ]
    folder = write_run(
        tmp_path / "run", metrics=metrics, environment=ENVIRONMENT | said, evaluations=evaluations,
        client_columns="round,client,group,samples,accuracy,loss,local/accuracy,bytes_up,"
        "bytes_down,flops",
    )  # fmt: skip
    page = ReadPage(build(folder))
    assert page.cards["personal accuracy"][0] == "65.00 %"
    said = "the global model on a client's own test samples"
    assert page.cards["local accuracy"] == ("95.00 %", said)
    assert page.cards["accuracy after local training"][0] == "70.00 %"
    assert page.table("group")["b"]["accuracy"] == "50.00 %"
    assert page.table("group")["b"]["global model"] == "98.00 %"
    sentence = "each client tests its slice, after aggregation, on its own test samples."
    assert f"In personal metrics, {sentence}" in unescape(page.source)


def test_a_table_holds_the_client_groups(page: ReadPage) -> None:
    assert page.table("group")["b"] == {
        "group": "b",
        "clients": "2",
        "accuracy": "40.00 %",
        "std over clients": "10.00 %",
        "worst 10 %": "30.00 %",
        "up / client": "500 B",
        "down / client": "1.00 kB",
        "compute / client": "2.00 GFLOPs",
    }


def test_title_line_configuration_and_environment(page: ReadPage) -> None:
    assert page.texts["h1"] == "known "
    assert page.texts["title"] == "known"
    line = "HeteroFL on Digits, 4 clients in 2 groups, 3 rounds, seed 7, 2 ranks"
    assert line in page.texts["p"]
    assert page.texts["pre"] == "seed_everything: 7\ndata:\n  name: Digits\n  batch_size: 32\n"
    environment = dict(row for row in page.cells[-1])
    assert environment["versions.torch"] == "2.12.1"
    assert environment["synthetic"] == "false"
    assert not any(key.startswith("experiment") for key in environment)


def with_checkpoint(folder: Path, **environment: Any) -> Path:
    """A run that has a checkpoint, though an empty one."""
    run = write_run(folder, environment=ENVIRONMENT | environment)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    return run


def test_the_commands_that_evaluate_and_compare_a_finished_run(tmp_path: Path) -> None:
    page = ReadPage(build(with_checkpoint(tmp_path / "my runs" / "run")))
    assert "After round 3, on test samples of Digits." in unescape(page.source)
    evaluate, compare = map(unescape, page.codes)
    config, checkpoint = "'my runs/run/config.yaml'", "'my runs/run/checkpoints/last.ckpt'"
    assert evaluate == f"lightfed validate --config {config} --ckpt_path {checkpoint}"
    assert compare == "lightfed compare 'my runs/run' 'my runs/OTHER'"
    assert "Resume" not in page.source


def test_the_command_that_resumes_a_stopped_run(tmp_path: Path) -> None:
    page = ReadPage(build(with_checkpoint(tmp_path / "runs" / "run-2", rounds=9)))
    resume = (
        "lightfed fit --config runs/run-2/config.yaml --ckpt_path runs/run-2/checkpoints/last.ckpt"
    )
    assert page.codes[0] == resume
    assert "<dt>Resume</dt>" in page.source


def test_a_script_resumes_from_python(tmp_path: Path) -> None:
    page = ReadPage(build(with_checkpoint(tmp_path / "runs" / "run", rounds=9, script="abc")))
    resume = "trainer.fit(federation, data, ckpt_path='runs/run/checkpoints/last.ckpt')"
    assert unescape(page.codes[0]) == resume


def test_the_commands_work_where_the_run_was_started(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path / "out" / "runs" / "run")
    (folder / "config.yaml").write_text("trainer:\n  default_root_dir: out/runs\n")
    page = ReadPage(build(folder))
    assert page.codes[1] == "lightfed compare out/runs/run out/runs/OTHER"


def test_a_run_without_a_checkpoint_does_not_say_how_to_resume(tmp_path: Path) -> None:
    page = ReadPage(build(write_run(tmp_path / "runs" / "run")))
    assert page.codes == ["lightfed compare runs/run runs/OTHER"]


@pytest.mark.parametrize("missing", ["clients.csv", "partition.npz"])
def test_a_figure_that_cannot_be_drawn_is_left_out(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / missing).unlink()
    assert ReadPage(build(folder)).tags.count("section") == 2


def test_everything_a_user_names_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"&amp;"
    metrics = {"personal/accuracy": (0.5, 0.6), f"personal/{evil}": (0.5, 0.6)}
    folder = write_run(
        tmp_path / "run",
        metrics=metrics,
        environment={
            "name": evil,
            "algorithm": evil,
            "dataset": evil,
            evil: {evil: evil},
            "groups": {evil: 2, "b": 2},
        },
        config=f"</pre>{evil}",
        evaluations=[(2, 0, evil, 3, 0.5, 1, 1, 1, 1), (2, 1, "b", 3, 0.6, 1, 1, 1, 1)],
        classes=(evil, "one", "two"),
    )
    page = ReadPage(build(folder))
    assert page.tags.count("script") == page.tags.count("section") + 3
    assert page.texts["h1"].strip() == page.texts["title"] == evil
    assert page.texts["pre"] == f"</pre>{evil}"
    assert evil in page.table("group")
    assert [f"{evil}.{evil}", evil] in page.cells[-1]


def test_a_bare_run_of_one_round_has_a_page(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "bare",
        metrics={"train_loss": (2.0,)},
        environment=None,
        config=None,
        evaluations=None,
        counts=None,
    )
    page = ReadPage(build(folder))
    assert page.cards == {"rounds": ("1", ""), "train loss": ("2", "best 2 in round 1")}
    assert page.texts["h1"] == "bare "
    assert "img" not in page.tags
    assert "No curves" in page.texts["p"]


def test_a_running_run_says_so_and_its_page_can_be_made_again(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        metrics={"train_loss": (2.0, 1.0)},
        environment={**ENVIRONMENT, "rounds": 3},
        evaluations=None,
        counts=None,
    )
    append(folder / "metrics.csv", "3,0.")
    page = ReadPage(build(folder))
    assert page.cards["rounds"] == ("2 of 3", "")
    assert page.texts["span"].startswith("not finished: 2 of 3 rounds")
    append(folder / "metrics.csv", "5\r\n")
    page = ReadPage(build(folder))
    assert page.cards["rounds"] == ("3", "")
    assert page.cards["train loss"][0] == "0.5"
    assert page.texts["span"].startswith("finished")


def test_a_loss_that_was_lost_says_so(tmp_path: Path) -> None:
    metrics = {"train_loss": (2.0, 1.0, "nan")}
    folder = write_run(tmp_path / "run", metrics=metrics, evaluations=None, counts=None)
    assert ReadPage(build(folder)).cards["train loss"] == ("not finite", "best 1 in round 2")


def test_the_same_run_gives_the_same_page(known: Path, tmp_path: Path) -> None:
    again = build(write_run(tmp_path / known.parent.name / "run"))
    assert again.read_bytes() == (known / "index.html").read_bytes()


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    metrics = {"train_loss": (2.0,)}
    folder = write_run(tmp_path / "run", metrics=metrics, evaluations=None, counts=None)
    (folder / "index.html").mkdir()
    with pytest.raises(UserError, match=r"report: .*index\.html cannot be written"):
        build(folder)
    assert not list(folder.glob(".*"))


def test_a_page_of_very_many_clients_is_small(tmp_path: Path) -> None:
    clients, rounds, rng = 20_000, 60, np.random.default_rng(0)
    curves = {name: rng.random(rounds).round(6).tolist() for name in METRICS}
    groups = dict.fromkeys("abcde", clients // 5)
    environment = ENVIRONMENT | {"clients": clients, "groups": groups}
    counts = rng.poisson(rng.gamma(0.5, 8, (clients, 10)))
    folder = write_run(
        tmp_path / "run", metrics=curves, environment=environment, counts=counts,
        classes=list("0123456789"), evaluations=None,
    )  # fmt: skip
    drawn = {name: rng.random(clients) for name in ("accuracy", "loss")}
    costs = {name: rng.integers(1, 10**9, clients) for name in ("bytes_up", "bytes_down", "flops")}
    owned = {
        "client": range(clients),
        "group": sorted("abcde" * (clients // 5)),
        "samples": counts.sum(1),
    }
    pd.DataFrame({"round": rounds, **owned, **drawn, **costs}).to_csv(
        folder / "clients.csv", index=False
    )
    text = build(folder).read_text()
    assert len(text) - len(library()) * 4 // 3 < 125_000
    assert text.count('class="figure"') >= 3
