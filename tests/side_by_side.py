"""Which clients of the shipped configurations train side by side, without training them.

    python tests/side_by_side.py [--clients 2] [configs/heterofl/mnist.yaml ...]

Prints a line for each way of a configuration's groups, as a table of docs/side_by_side.md. Data
sets come from `tests.data.tiny`: samples of the published shapes, but fewer, and the vocabulary of
WikiText-2 is smaller. `lightfed plan --config FILE --world_size N` says the same of your own data.
"""

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import yaml

from lightfed.cli import command_line
from lightfed.distributed.collectives import Ranks
from lightfed.engine.federation import Federation
from lightfed.local.client_group import GroupState, group_names
from lightfed.local.rank_sessions import Training
from lightfed.previews.plan import packs_text
from lightfed.previews.trainer import PreviewTrainer
from tests.data import tiny

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


class Groups:
    """The groups of a federation whose data is not partitioned; has what packs are decided by."""

    def __init__(self, model: Federation, trainer: PreviewTrainer, data: Any) -> None:
        options = model.fleet_options(trainer)
        self.algorithm, self.clients, self.data = model.algorithm, model.num_clients, data
        self.work = options["work"]
        self.masks, self.device = None, CPU
        self.ranks, self.seed = Ranks(CPU), model.seed
        self.groups = [
            GroupState(
                group,
                data,
                name=name,
                position=position,
                seed=model.seed,
                device=CPU,
                host_rows=options["host_rows"],
                row_folder=options["row_folder"],
                prepare=model.algorithm.prepare_module,
            )
            for position, (group, name) in enumerate(
                zip(model.groups, group_names(model.groups), strict=True)
            )
        ]
        self.training = Training(self)  # type: ignore[arg-type]


def lines_of(config: Path, files: Path, clients: str | None) -> list[str]:
    """The ways in which a configuration's groups are trained, or would be in packs of `clients`."""
    found: list[str] = []

    def note(self: PreviewTrainer, model: Federation, datamodule: Any, **_: Any) -> None:
        groups: Any = Groups(model, self, datamodule)
        decide = model.packing_of(self)
        for state in groups.groups:
            state.packing = decide(groups, state)
        found.extend(packs_text(groups.training.side_by_side)[0].removeprefix("packs").split("\n"))

    text = yaml.safe_load(config.read_text())
    if clients is not None:
        text["model"]["side_by_side"] = int(clients)
    dataset = text["data"]["dataset"]
    if isinstance(dataset, dict) and "root" in dataset.get("init_args", {}):
        dataset["init_args"]["root"] = str(files)
        if dataset["class_path"] in ("CIFAR10", "CIFAR100", "MNIST"):
            dataset["init_args"]["verify_checksums"] = False
    with TemporaryDirectory() as folder:
        changed = Path(folder) / config.name
        changed.write_text(yaml.safe_dump(text))
        with mock.patch.object(PreviewTrainer, "groups", note):
            command_line.main(["groups", "--config", str(changed)])
    return [line.strip() for line in found]


@contextlib.contextmanager
def stand_ins() -> Iterator[Path]:
    """A folder with the files of all data sets that an installation lacks."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        for make in (tiny.mnist, tiny.cifar10, tiny.cifar100, tiny.wikitext2, tiny.cinic10):
            make(root)
        tiny.ag_news(root)
        tiny.speech_commands(root)
        sources = tiny.documented(root / "sources")
        known = mock.patch("lightfed.data.datasets.docstrings.source_folders", return_value=sources)
        cache = mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(root / "cache")})
        with known, cache:
            yield root


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--clients", help="of a pack, in place of the configuration's side_by_side")
    options = parser.parse_args(words)
    shipped = ROOT / "configs"
    configs = [path.resolve() for path in options.configs] or sorted(shipped.rglob("*.yaml"))
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    print("| configuration | groups of clients |\n|---|---|")
    with stand_ins() as files:
        for config in configs:
            with contextlib.redirect_stdout(io.StringIO()):
                lines = lines_of(config, files, options.clients)
            name = config.relative_to(shipped).with_suffix("")
            print(f"| {name} | {'; '.join(lines)} |", flush=True)


if __name__ == "__main__":
    main()
