"""A run's own config.yaml describes the run: its words make the same run again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch import nn

from lightfed.cli import federation_cli
from lightfed.cli.command_line import main, prepared
from lightfed.cli.shipped import ROOT
from lightfed.utils.keys import digest, identity
from tests.promises.refusals.mistakes import edited, of_class, one_group
from tests.promises.refusals.own_code import Net

CONFIGS = ("quickstart", "dispfl/digits", "fedbcd/digits-async", "heterofl/digits", "lora/chars")


class Based(Net):
    """A client that begins from a folder, or from what a function makes, as a PeftClient does."""

    def __init__(self, base: Callable[[], nn.Module] | str) -> None:
        super().__init__()
        self.base = base if isinstance(base, str) else base()


def a_base() -> nn.Module:
    return nn.Linear(1, 1)


@pytest.fixture
def identities(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each command that is read in this process resumes as."""
    found: list[dict[str, Any]] = []

    def recorded(config: Any) -> dict[str, Any]:
        found.append(identity(config))
        return found[-1]

    monkeypatch.setattr(federation_cli, "identity", recorded)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_file_of_a_run_describes_the_same_run(
    name: str, tmp_path: Path, identities: list[dict[str, Any]]
) -> None:
    trainer: Any = prepared(["fit", "--config", str(ROOT / f"{name}.yaml")]).trainer
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(trainer.config, sort_keys=False))
    prepared(["fit", "--config", str(own)])
    first, second = identities
    assert first == second
    assert digest(first) == digest(second)


@pytest.mark.parametrize("base", ["a-folder", f"{__name__}.a_base"])
def test_a_run_is_repeated_and_resumed_by_its_own_file(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    client = one_group(of_class(f"{__name__}.Based", base=base))
    (tmp_path / "run.yaml").write_text(edited(client | {"trainer.enable_page": False}))
    main(["fit", "--config", "run.yaml"])
    own = Path("runs/run/config.yaml")
    written = yaml.safe_load(own.read_text())
    assert written["model"]["clients"][0]["model"]["init_args"]["base"] == base
    main(["fit", "--config", str(own), "--trainer.name", "again"])
    tables = [Path(f"runs/{name}/clients.csv").read_text() for name in ("run", "again")]
    assert tables[0] == tables[1]
    path = ["--ckpt_path", "runs/run/checkpoints/last.ckpt", "--trainer.max_epochs", "2"]
    main(["fit", "--config", str(own), *path])
    assert "another configuration" not in caplog.text
    assert len(Path("runs/run/metrics.csv").read_text().splitlines()) == 3


def test_a_digest_of_a_function_is_that_of_its_name() -> None:
    """Its address differs from process to process."""

    def made() -> Callable[[], None]:
        def named() -> None: ...

        return named

    assert digest({"base": made()}) == digest({"base": made()})
    assert digest({"base": made()}) != digest({"base": made})
