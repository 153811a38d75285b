"""Whatever a user gets wrong is one line that names the key, and leaves all files as they were."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightfed.cli.command_line import USAGE_ERROR, main
from lightfed.data.datamodule import FederatedDataModule
from lightfed.runs.checkpoint import SHARDS
from tests.promises.refusals.mistakes import ALL, BASE, PARTITION, Case, edit, hidden, of_class
from tests.tiers import first_of_each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an older run of this name, and files that are not what they seem."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "metrics.csv").write_text("round\n1\n")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    (tmp_path / "negative.txt").write_text("0.5\n-1\n")
    (tmp_path / "truncated.ckpt").write_bytes(b"PK\x03\x04 and no more")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    later = {"tag": "x", "ranks": 0, "format": 99}
    torch.save({"state_dict": {}, SHARDS: later}, tmp_path / "newer.ckpt")
    raw = tmp_path / "corrupt" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"no images")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def the_error(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command prints on its way out."""
    warned: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = warned.append  # type: ignore[method-assign]
    logging.getLogger("lightfed").addHandler(listener)
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(SystemExit) as left,
    ):
        main(list(words))
    logging.getLogger("lightfed").removeHandler(listener)
    printed = capsys.readouterr()
    assert [record.getMessage() for record in warned] == []
    assert left.value.code == USAGE_ERROR
    assert [str(warning.message) for warning in caught] == []
    assert "Traceback" not in printed.err
    lines = printed.err.splitlines()
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("lightfed: error: ")
    assert len(lines[0]) <= 400
    return lines[0].removeprefix("lightfed: error: ")


def named(case: Case) -> str:
    return f"{case.key} {case.fragment}".replace("::", ":")


@pytest.mark.parametrize("case", first_of_each(ALL, lambda case: case.kind, named))
def test_a_mistake_is_one_line_that_names_its_key(
    case: Case, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = case.write(folder)
    before = contents(folder)
    error = the_error(words, capsys)
    assert error.startswith(f"{case.key}: ") or error.startswith(f"{case.key}."), error
    assert case.fragment in error
    assert "; " in error  # what to do
    assert contents(folder) == before


ALGORITHMS = "; name one, such as APFL, "
OWN = ", or a class of your own derived from Algorithm"


@pytest.mark.parametrize(
    ("key", "value", "fragments"),
    [
        ("model.algorithm", {"mask": True}, ["is abstract", ALGORITHMS, OWN]),
        ("model.algorithm", "Algorithm", ["Algorithm is abstract", ALGORITHMS, OWN]),
        ("model.algorithm", "lightfed.Algorithm", ["is abstract", ALGORITHMS, OWN]),
        ("model.algorithm", "Qqq", ["Qqq", ALGORITHMS, OWN]),
        ("data.dataset", "Dataset", ["Dataset is abstract", "; known: ", "Digits"]),
    ],
)
def test_who_names_an_abstract_class_is_told_which_are_none(
    key: str,
    value: Any,
    fragments: Sequence[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = the_error(edit(key, value, "").write(folder), capsys)
    assert error.startswith(f"{key}: ")
    for fragment in fragments:
        assert fragment in error, error


IMPORTS = {
    "import nothing_of_this_name\nclass Net: ...": "No module named 'nothing_of_this_name'",
    "class Net(:": "invalid syntax (own_net_1.py, line 1)",
    "Other = 1": "module 'own_net_2' has no attribute 'Net'",
    "Net = [][7]": "list index out of range",
}


@pytest.mark.parametrize("number", range(len(IMPORTS)))
def test_why_the_file_of_a_model_cannot_be_imported_is_said(
    number: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(folder)
    text, found = list(IMPORTS.items())[number]
    (folder / f"own_net_{number}.py").write_text(text)
    words = edit("model.clients.1.model", f"own_net_{number}.Net", "").write(folder)
    error = the_error(words, capsys)
    assert error.startswith("model.clients")
    assert f": {found}, from " in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = the_error(edit("trainer.accelerator", "gpu", "").write(folder), capsys)
    assert error.startswith("trainer.accelerator: 'gpu', but torch finds no CUDA device here; ")


@pytest.mark.parametrize("callback", ["EarlyStopping", "ModelCheckpoint"])
def test_a_monitor_that_nobody_measures_is_reported_with_those_that_are(
    callback: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = edit("trainer.callbacks", [of_class(callback, monitor="accuracy")], "")
    error = the_error(case.write(folder), capsys)
    assert error.startswith("trainer.callbacks: ")
    assert "global/accuracy" in error


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "lightfed: no command; use one of fit, validate, test, "),
        (["--config", "bad.yaml"], "lightfed: no command; use one of fit, validate, test, "),
        (["--config", "bad.yaml", "swep"], "lightfed: no command 'swep'; did you mean sweep?"),
        (["fit"], "model.algorithm: the following arguments are required: "),
        (["--config", "bad.yaml", "fit"], "--config: "),
        (["configs", "nowhere"], "configs: argument COMMAND: invalid choice: 'nowhere'"),
        (["report"], "report: the following arguments are required: RUN; see lightfed report"),
        (["report", "nowhere"], "report: there is no folder nowhere; name the folder of a run"),
        (["report", "corrupt"], "report: corrupt holds no metrics.csv; name the folder of a run"),
    ],
)
def test_a_command_line_without_its_parts(
    words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.yaml").write_text(BASE)
    assert the_error(words, capsys).startswith(line)


def test_an_error_of_the_program_keeps_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Mock(side_effect=RuntimeError("a bug"))  # not raised in this file: it is a user's
    monkeypatch.setattr(FederatedDataModule, "prepare", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(Case("", "").write(folder))
    assert [path.name for path in (folder / "runs").iterdir()] == ["bad"]


@pytest.mark.parametrize(("rounds", "place"), [(0, "cache/lightfed"), (1, "runs/bad-2")])
def test_the_traceback_of_a_users_error_is_in_the_run_or_the_cache(
    rounds: int,
    place: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    callback = of_class(
        "tests.promises.refusals.own_code.Calls", hook="on_train_epoch_start", after=rounds
    )
    case = Case("", "", {"trainer.callbacks": [callback], "trainer.max_epochs": 3})
    error = the_error(case.write(folder), capsys)
    assert error.endswith(f"its traceback is in {place}/error.log")
    text = (folder / place / "error.log").read_text()
    assert text.count("Traceback") == 1
    assert text.rstrip().endswith("LookupError: no such thing")
    assert (folder / "runs" / "bad-2").exists() == bool(rounds)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one round."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "good.yaml").write_text(BASE)
        main(["fit", "--config", "good.yaml"])
    return folder


@pytest.mark.parametrize(
    ("edits", "fragment"),
    [
        ({"model.seed": 5}, "its seed is 0, this run's is 5"),
        ({"model.algorithm": "Standalone"}, "its algorithm is HeteroFL, this run's is Standalone"),
        ({f"{PARTITION}.alpha": 9.0}, "its partition is"),
        ({"model.clients.1.count": 3}, "its groups is"),
        (hidden(8), "its architectures is"),
    ],
)
def test_a_run_is_left_alone_by_one_that_cannot_go_on_from_it(
    edits: dict[str, Any],
    fragment: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(finished)
    words = ["--ckpt_path", "runs/good/checkpoints/last.ckpt"]
    command = Case("ckpt_path", fragment, edits, words).write(finished)
    before = contents(finished)
    error = the_error(command, capsys)
    assert error.startswith("ckpt_path: a checkpoint of another federation: ")
    assert fragment in error
    assert contents(finished) == before
