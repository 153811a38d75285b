"""A model of a finished run that is to be shared, and what its run says about it."""

import inspect
import json
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

import lightfed
from lightfed.lab.results.paired import mean_and_std, t_half_width
from lightfed.lab.results.run import OF_CLIENTS, Run, base_name, read, reading
from lightfed.runs.export import INPUTS, LIST, group_file
from lightfed.utils.errors import UserError

_HOW_TO_EXPORT = (
    "write it by the command of the run with --ckpt_path last --model.export '[server,clients]'"
)

# Names of data sets of the package on the hub.
_ON_THE_HUB = {
    "AGNews": "fancyzhx/ag_news",
    "CIFAR10": "uoft-cs/cifar10",
    "CIFAR100": "uoft-cs/cifar100",
    "FashionMNIST": "zalando-datasets/fashion_mnist",
    "MNIST": "ylecun/mnist",
    "SpeechCommands": "google/speech_commands",
    "WikiText2": "Salesforce/wikitext",
}
_DATA_OF_SPEECH = ("SpeechCommands", "Tones")


class Metric(NamedTuple):
    """A value of the model.

    Attributes:
        name: The name of the metric, such as `accuracy`.
        of: On whose samples it was tested, in words.
        value: The value of this model.
        mean: The mean over the seeds; NaN for one seed, and for a single client's model.
        half: Half of the 95 % t interval of that mean; NaN without a mean.
    """

    name: str
    of: str
    value: float
    mean: float = math.nan
    half: float = math.nan


class Method(NamedTuple):
    """What the file of an algorithm says.

    Attributes:
        name: The class.
        summary: What the method does; empty for an algorithm that is not of the package.
        paper: Authors, title, place, year and link; empty if the file names none.
    """

    name: str
    summary: str = ""
    paper: str = ""


@dataclass(frozen=True)
class SharedModel:
    """A model of a run, and the runs of other seeds.

    Attributes:
        name: The name of its files: `server`, `group-a`, `client3`.
        entry: What models.json says of it.
        inputs: What inputs.json says: what the network takes. Empty for runs before it was written.
        runs: The run of the model, and runs of the same experiment with other seeds.
    """

    name: str
    entry: dict[str, Any]
    inputs: dict[str, Any]
    runs: Sequence[Run]

    @classmethod
    def of(cls, folders: Sequence[Path], wanted: str) -> "SharedModel":
        """Find a model.

        Args:
            folders: The folder of its run, and those of other seeds.
            wanted: `server`, the name of a group, or `client3`.

        Raises:
            UserError: A folder is not a finished run, the runs are not seeds of one experiment, or
                the run has not exported such a model.
        """
        runs = [read(folder) for folder in folders]
        for run in runs:
            if not run.finished:
                found = f"{run.folder} is not finished"
                raise UserError("export", found, "resume it with --ckpt_path last")
        _check_seeds(runs)

        models = runs[0].folder / "models"
        entries = _read_json(models / LIST)
        name = _file_of(wanted, entries)
        if name is None:
            there = ", ".join(entries) or "none"
            found = f"{wanted}, and {models} has {there}"
            raise UserError("--model", found, _HOW_TO_EXPORT)
        return cls(name, entries[name], _read_json(models / INPUTS), runs)

    @property
    def run(self) -> Run:
        """The run of the model."""
        return self.runs[0]

    @property
    def models(self) -> Path:
        """The folder of the run's exported files."""
        return self.run.folder / "models"

    @property
    def adapter(self) -> Path | None:
        """The folder that its module has written in a form of its own; None if there is none."""
        folder = self.entry.get("folder")
        return None if folder is None else self.models / str(folder)

    @property
    def is_adapter(self) -> bool:
        """Whether it is adapters of peft, without the model below them."""
        return self.adapter is not None and (self.adapter / "adapter_config.json").is_file()

    @property
    def description(self) -> str:
        """Whose model it is, in words."""
        client = self.entry.get("client")
        group = self.entry.get("group")
        if client is None:
            return "the server's model"
        if self.name.startswith("client"):
            return f"the model of client {client} (group {group})"
        return f"the model of group {group} (that of its first client, client {client})"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run, with the sections trainer, model and data; empty without.

        A configuration that is damaged counts as missing: it is only described.
        """
        with suppress(yaml.YAMLError):
            config = yaml.safe_load(self.run.config)
            if isinstance(config, dict):
                return config
        return {}

    @property
    def method(self) -> Method:
        """The algorithm of the run."""
        name = self.run.algorithm
        path = _at(self.config, "model", "algorithm", "class_path")
        kind = None
        # Code that is not of the package is not imported for the sake of a card.
        if not isinstance(path, str) or path.startswith("lightfed."):
            kind = getattr(lightfed, name, None)
        if not inspect.isclass(kind):
            return Method(name)

        text = inspect.getdoc(sys.modules[kind.__module__]) or ""
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
        for paragraph in paragraphs:
            citation = re.match(r".*?https?://\S+", paragraph)
            if citation is not None:
                return Method(name, paragraphs[0], citation[0].rstrip(".,;:)"))
        return Method(name, paragraphs[0])

    @property
    def command(self) -> str:
        """The command of the run, without the path of the program."""
        words = str(self.run.environment.get("command", "")).split(" ")
        program = Path(words[0]).name
        words[0] = f"python {program}" if program.endswith(".py") else program
        return " ".join(words).strip()

    @property
    def partition(self) -> str:
        """How the data were split over the clients, such as `Dirichlet (alpha 0.5)`."""
        written = _at(self.config, "data", "partition")
        if isinstance(written, str):
            return written.rpartition(".")[2]
        if not isinstance(written, dict):
            return "not known"

        name = str(written.get("class_path", "not known")).rpartition(".")[2]
        arguments = written.get("init_args")
        parts = []
        if isinstance(arguments, dict):
            parts = [f"{key} {value}" for key, value in arguments.items() if value is not None]
        return f"{name} ({', '.join(parts)})" if parts else name

    @property
    def data_on_hub(self) -> str:
        """The name of the data set on the hub; empty if it is not known to be there."""
        path = _at(self.config, "data", "dataset", "init_args", "path")
        is_hub_data = self.run.data == "Hub" or str(
            _at(self.config, "data", "dataset", "class_path")
        ).endswith(".Hub")
        is_name = isinstance(path, str) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None
        if is_hub_data and is_name and not Path(str(path)).exists():
            return str(path)
        return _ON_THE_HUB.get(self.run.data, "")

    @property
    def task(self) -> str:
        """The task by its name on the hub; `other` if it has none."""
        shape = self.inputs.get("shape") or ()
        kind = self.inputs.get("task")
        if self.adapter is not None:
            classifies = any(metric.name == "accuracy" for metric in self.metrics)
            return "text-classification" if classifies else "text-generation"
        if kind == "masked_lm":
            return "fill-mask"
        if kind == "regression":
            return "tabular-regression"
        if kind == "classification" and self.run.data in _DATA_OF_SPEECH:
            return "audio-classification"
        if kind == "classification" and len(shape) == 3:
            return "image-classification"
        return "other"

    @property
    def metrics(self) -> list[Metric]:
        """The final metrics of this model; values that are not finite are left out."""
        if self.entry.get("client") is None:
            found = self._metrics_in(dict.fromkeys(self._columns("global"), "the global test set"))
        elif self.name.startswith("client"):
            found = self._metrics_of_client(int(self.entry["client"]))
        else:
            found = self._metrics_of_group(str(self.entry["group"]))
        return [metric for metric in found if math.isfinite(metric.value)]

    def _columns(self, kind: str) -> list[str]:
        return [column for column in self.run.metrics if column.startswith(f"{kind}/")]

    def _metrics_of_group(self, group: str) -> list[Metric]:
        """Return the means over the clients of a group."""
        columns = {}
        for kind in ("personal", "local"):
            samples = f"the test samples of the clients of group {group}, mean over clients"
            if kind in OF_CLIENTS:
                samples += f" ({OF_CLIENTS[kind][1]})"
            for column in self._columns(kind):
                # With one group there is no column of its own.
                own = f"{column}/{group}" if len(self.run.client_groups) > 1 else column
                columns[own] = samples

        metrics = []
        for metric in self._metrics_in(columns):
            metrics.append(metric._replace(name=metric.name.removesuffix(f"/{group}")))
        return metrics

    def _metrics_in(self, columns: dict[str, str]) -> list[Metric]:
        """Return the last values in columns of metrics.csv, and the means over the seeds.

        Args:
            columns: By column, on whose samples it is tested.
        """
        metrics = []
        for column, of in columns.items():
            values = [run.final(column) for run in self.runs]
            metric = Metric(base_name(column), of, values[0])
            if len(values) > 1 and all(map(math.isfinite, values)):
                mean, std = mean_and_std(values)
                metric = metric._replace(mean=mean, half=float(t_half_width(std, len(values))))
            metrics.append(metric)
        return metrics

    def _metrics_of_client(self, client: int) -> list[Metric]:
        """Return the values of a client's last evaluation.

        A client of another seed has other samples, so there is no mean over seeds.
        """
        table = self.run.evaluation
        if client not in table.index:
            return []
        row = {str(name): value for name, value in table.loc[client].to_dict().items()}

        names = {base_name(column) for column in self.run.metrics}
        metrics = []
        for name, value in row.items():
            if name in names:
                of = f"the test samples of client {client}"
                metrics.append(Metric(name, of, float(value)))
        return metrics


def _check_seeds(runs: Sequence[Run]) -> None:
    """Refuse runs that are no seeds of one experiment."""
    first = runs[0]
    seeds = {first.seed}
    for run in runs[1:]:
        if run.digest != first.digest:
            found = f"{run.folder} is another experiment than {first.folder}"
            raise UserError("export", found, "name runs that differ only in the seed")
        if run.seed in seeds:
            found = f"{run.folder} has seed {run.seed}, as another run has"
            raise UserError("export", found, "name each seed once")
        seeds.add(run.seed)


def _file_of(wanted: str, entries: dict[str, Any]) -> str | None:
    """Return the name of the files of a model.

    Args:
        wanted: The name of a file, or of a group.
        entries: What models.json says.

    Returns:
        The name; None if there are no such files.
    """
    for name in (wanted, group_file(wanted)):
        if name in entries:
            return name
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """Return an object in a file; empty without the file."""
    if not path.is_file():
        return {}
    with reading(path):
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no names")
        return content


def _at(value: Any, *keys: str) -> Any:
    """Return what is below keys in nested mappings; None where one of them is missing."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value
