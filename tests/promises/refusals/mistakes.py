"""Configurations with one mistake each, and what has to be said of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightfed import Algorithm, Fleet
from lightfed.data.dataset import Dataset
from lightfed.data.partition.schemes import Partitioner
from tests.promises.refusals import own_code

BASE = """
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false}
model:
  algorithm: HeteroFL
  clients:
  - {count: 1, level: a, model: {class_path: Conv, init_args: {hidden: [4]}}}
  - {count: 2, level: b, model: {class_path: Conv, init_args: {hidden: [4]}}}
  optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.05}}
data:
  dataset: Digits
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5}}
"""
HERE = __name__
CODE = own_code.__name__
GONE = object()  # an edit that takes a key away


class Unfinished(Algorithm):
    """An algorithm without a `setup`."""

    @override
    def round(self, fed: Fleet, t: int) -> None:
        pass


class Keeps(Unfinished):
    """It keeps what only clients of a stateful algorithm can keep."""

    @override
    def setup(self, fed: Fleet) -> None:
        fed.keep("control")


class Refuses(CSVLogger):
    """A logger whose backend does not take its settings."""

    def __init__(self, save_dir: str) -> None:
        raise RuntimeError(f"{save_dir} is retired")


class Unvalidated(own_code.Linear):
    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).sum()


class Manual(Unvalidated):
    automatic_optimization = False

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.automatic_optimization = False


UNCALLED = (
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip


def _nothing(self: Any, *args: Any) -> None:
    """What a hook does here."""


for _hook in UNCALLED:
    globals()[f"Has_{_hook}"] = type(f"Has_{_hook}", (Unvalidated,), {_hook: _nothing})


class TwoOptimizers(Unvalidated):
    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: it never comes to that."""

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@dataclass
class Case:
    """A mistake.

    Attributes:
        key: that the error names.
        fragment: that it holds.
        edits: of the base configuration, by dotted key.
        words: behind the configuration on the command line.
        text: in place of the whole configuration.
        command: the sub-command.
    """

    key: str
    fragment: str
    edits: Mapping[str, Any] = field(default_factory=dict)
    words: Sequence[str] = ()
    text: str | None = None
    command: str = "fit"

    @property
    def kind(self) -> tuple[str, ...]:
        """What is refused: an argument of a trainer or module, or a class of a user's own."""
        return self.key, *re.findall(rf"{CODE}\.(\w+)", str(self.edits))

    def write(self, folder: Path) -> list[str]:
        """The configuration into a folder; the command line."""
        (folder / "bad.yaml").write_text(self.text if self.text is not None else edited(self.edits))
        return [self.command, "--config", "bad.yaml", *self.words]


def edited(edits: Mapping[str, Any]) -> str:
    config = yaml.safe_load(BASE)
    for key, value in edits.items():
        *path, last = (int(step) if step.isdigit() else step for step in key.split("."))
        node = config
        for step in path:
            node = node[step]
        if value is GONE:
            del node[last]
        else:
            node[last] = value
    return str(yaml.safe_dump(config))


def of_class(path: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": path, "init_args": arguments}


def one_group(model: Any) -> dict[str, Any]:
    return {"model.algorithm": "FedAvg", "model.clients": [{"count": 2, "model": model}]}


def hidden(*widths: int) -> dict[str, Any]:
    return {f"model.clients.{i}.model.init_args.hidden": list(widths) for i in range(2)}


def edit(key: str, value: Any, fragment: str, *, named: str = "") -> Case:
    """A wrong value at a key, which the error names (or `named`)."""
    return Case(named or key, fragment, {key: value})


def cloud_of(**arguments: Any) -> dict[str, Any]:
    """Edits to a federation of three servers with two devices each."""
    model = {"class_path": "Conv", "init_args": {"hidden": [4]}}
    return {
        "model.algorithm": of_class("FedBCD", **({"servers": 3, "active": 1} | arguments)),
        "model.clients": [{"count": 6, "model": model}],
    }


def clouds(fragment: str, named: str = "", **arguments: Any) -> Case:
    """A wrong argument of FedBCD, which the error names: the last one, or `named`."""
    key = named or list(arguments)[-1]
    return Case(f"model.algorithm.init_args.{key}", fragment, cloud_of(**arguments))


MODEL = "model.clients.1.model"
PARTITION = "data.partition.init_args"

UNKNOWN_KEYS = [
    edit("trainr", {"max_epochs": 1}, "mean trainer.max_epochs?", named="trainr.max_epochs"),
    edit("trainer.max_epoch", 3, "did you mean trainer.max_epochs?"),
    edit("data.zzz", 8, "no such key; see --help"),
    edit("model.lr", 0.1, "no such key; use model.optimizer.lr"),
    edit("fit", {"trainer": {"max_epochs": 1}}, "mean trainer.max_epochs?", named="fit.trainer"),
    edit("model.clients.1.cuont", 3, "did you mean count?"),
    edit(f"{MODEL}.init_args.widht", 3, "known: hidden, input_shape"),
    edit(f"{MODEL}.hidden", [3], "no such key beside class_path; write it below init_args"),
    Case("model.algorithm.init_args.msk", "mask", words=["--model.algorithm.msk", "true"]),
    Case("model.clients.2.count", "2 items", words=["--model.clients.2.count", "3"]),
    Case("model.clients.1.model.init_args.hiden", "did you mean hidden?",
         words=["--model.clients.1.model.hiden", "[4]"]),
    edit("model.algorithm", of_class("FML"), "required: shared; name a Module by class_path",
         named="model.algorithm.init_args.shared"),
    Case("model.export", "'clients']], as [one,other]", words=["--model.export", "server,clients"]),
    edit("model.algorithm", f"{HERE}.Unfinished", f"{HERE}.Unfinished lacks setup"),
    edit("model.algorithm", f"{HERE}.Keeps", "keeps control, but is not stateful"),
    Case("model.clients.1.count", "three; give int", words=["--model.clients.1.count=three"]),
    edit("trainer.callbacks", [of_class("Timer"), of_class("EarlyStopping", monitr="x")],
          "did you mean monitor?", named="trainer.callbacks.1.init_args.monitr"),
]  # fmt: skip

WRONG_VALUES = [
    edit("trainer", None, "write keys below it"),
    edit("trainer.max_epochs", "many", "many; give int"),
    edit("trainer.strategy", "ddp", "ddp; give"),
    edit("trainer.limit_train_batches", "all", "all; give int | float"),
    edit("model.store", "tape", "tape; give Literal['device', 'host']"),
    edit("model.evaluate", ["globl"], "globl; give Sequence[Literal['global'"),
    edit("model.clients", 3, "3; give list"),
    edit("model.clients.1", "wide", "wide; give list"),
    edit("model.clients.1.level", "z", "z; give Optional[Literal['a'"),
    edit(f"{MODEL}.init_args.hidden", "wide", "wide; give Sequence[int]"),
    Case("model.optimizer.init_args.lr", "abc; give float", words=["--model.optimizer.lr", "abc"]),
]  # fmt: skip

NO_CLASSES = [
    edit(
        "model.algorithm",
        of_class("DisPFL", topology=of_class("TimeVarying", neighbours=0)),
        "topology.init_args.neighbours: 0; give at least 1",
    ),
    edit("model.algorithm", "FedAvgg", "FedAvgg; did you mean FedAvg?"),
    edit("model.algorithm", "lightfed.algorithms.nothing.FedAvg", "did you mean FedAvg?"),
    edit("model.algorithm", "torch.optim.SGD", "torch.optim.SGD does not"),
    edit("model.algorithm", {"mask": True}, "or a class of your own derived from Algorithm"),
    edit("model.optimizer", of_class("torch.optim.SGDD"), "did you mean SGD?"),
    edit("model.optimizer", {"lr": 0.1}, "no class_path; known: "),
    edit(MODEL, of_class("Convv"), "Convv; did you mean Conv?"),
    edit(MODEL, of_class("collections.OrderedDict"), "collections.OrderedDict"),
    edit("model.lr_schedule", of_class("torch.optim.SGD", lr=0.1), "torch.optim.SGD"),
    edit("trainer.callbacks", [of_class("EarlyStoping")], "did you mean EarlyStopping?",
          named="trainer.callbacks.0"),
    edit("trainer.callbacks", [of_class("EarlyStopping", monitor="global/loss", mode="up")],
          "`mode` can be min, max, got up"),
    edit("trainer.logger", of_class(f"{HERE}.Refuses", save_dir="logs"), "logs is retired"),
    edit("trainer.logger", [of_class(f"{HERE}.Refuses", save_dir="logs")], "logs is retired"),
]  # fmt: skip

MISSING = [
    edit("model.algorithm", "FedProx", "required: mu; give float",
          named="model.algorithm.init_args.mu"),
    edit("data.partition", "Dirichlet", "required: alpha; give float", named=f"{PARTITION}.alpha"),
    edit("model.clients.1.count", GONE, "required: count; give int"),
    edit(MODEL, GONE, "required: model; name a Module"),
    edit("data.dataset", GONE, "known: AGNews, CIFAR10, "),
    edit("data", GONE, "data.partition;", named="data.dataset"),
    edit("model.optimizer", GONE, "class_path: torch.optim.SGD"),
]  # fmt: skip

FILES = [
    Case("--config", "line 2", text="trainer: {max_epochs: 1\nmodel: ["),
    Case("--config", "Unexpected config", text=""),
    Case("--config", "- 1 - 2", text="- 1\n- 2\n"),
    Case("model.seed", "lines 2 and 3 of bad.yaml", text="model:\n  seed: 1\n  seed: 2\n"),
    edit("data.batch_size", None, "no value"),
    edit("trainer.logger", None, "no value"),
    Case("config", "does not exist", words=["--config", "nowhere.yaml"]),
    Case("config", "not a file", words=["--config", "runs"]),
    Case("--config", "utf-8", words=["--config", "binary"]),
    Case("--config", "expected one argument", words=["--config"]),
    Case("--trainer.max_epochs", "expected one argument", words=["--trainer.max_epochs"]),
    Case("extra", "no such key", words=["extra"]),
    Case(
        "model.local_epoch", "did you mean model.local_epochs", words=["--model.local_epoch", "3"]
    ),
    Case("lightfed", "no command 'train'; use one of fit, validate", command="train"),
    Case("lightfed", "no command 'swep'; did you mean sweep?", command="swep"),
]

FEDERATIONS = [
    edit("model.clients", [], "an empty list"),
    edit("model.clients.1.count", 0, "0 clients; give at least 1"),
    Case("model.clients.1.rate", "1.5 is outside (0, 1]",
         {"model.clients.1.level": GONE, "model.clients.1.rate": 1.5}),
    edit("model.clients.1.rate", 0.5, "both rate 0.5 and level b are given; keep one"),
    edit(MODEL, of_class("torchvision.models.resnet18"), "a built ResNet; name a class"),
    edit("model.fraction", 0, "0.0 is outside (0, 1]"),
    edit("model.clients_per_round", 9, "9 of 3 clients"),
    edit("model.local_epochs", 0, "give at least 1"),
    edit("model.local_steps", 0, "give at least 1"),
    Case("model.local_steps", "give one of", {"model.local_epochs": 2, "model.local_steps": 3}),
    edit("model.eval_clients", 0, "give at least 1"),
    edit("model.algorithm", of_class("FedProx", mu=-1), "-1.0; give a number of 0 or more",
          named="model.algorithm.init_args.mu"),
    edit("model.algorithm", of_class("HeteroFL", statistics_batch_size=1), "give at least 2",
          named="model.algorithm.init_args.statistics_batch_size"),
    edit("model.algorithm", "FedAvg", "FedAvg needs one for all", named="model.clients"),
    Case("model.clients.0.rate", "put the widest group first",
         {"model.clients.0.level": "b", "model.clients.1.level": "a"}),
    edit(f"{MODEL}.init_args.hidden", [4, 4], "group b does not fit", named="model.clients"),
    edit(f"{MODEL}.init_args.num_classes", 7, "7, where the run has 10"),
    edit(f"{MODEL}.init_args.hidden", [-8], "negative dimension", named=MODEL),
    edit(f"{MODEL}.init_args", {"hidden": [6], "norm": "gn"},
         "must be divisible by num_groups", named=MODEL),
    Case("model.clients.0.model", "(1, 8, 8) (RuntimeError: Given input size: (4x1x1)",
         hidden(4, 4, 4, 4, 4)),
    Case("model.clients.0.model", "has the shape (0, 1, 3, 3); give sizes above 0", hidden(0)),
    Case("model.clients.0.model", "(2, 64); it must be (2, 10)",
         one_group(of_class("torch.nn.Flatten"))),
    Case("model.clients.0.model.init_args.name", "no model 'resnet181'",
         one_group(of_class("Torchvision", name="resnet181"))),
    Case("model.clients.0.model", "expected input[2, 1, 8, 8] to have 3 channels",
         one_group(of_class("Torchvision", name="resnet18"))),
    Case("model.clients.0.level", "a width of 0.5, and Torchvision takes no rate; give its",
         {**one_group(of_class("Torchvision", name="resnet18")), "model.clients.0.level": "b"}),
    Case("model.clients.0.rate", "a width of 0.25, and Unvalidated takes no rate",
         {**one_group(of_class(f"{HERE}.Unvalidated")), "model.clients.0.rate": 0.25}),
    Case("model.clients.0.model", "has no training_step", one_group(of_class(f"{CODE}.Linear"))),
    Case("model.clients.0.model", "validation_step", one_group(of_class(f"{HERE}.Unvalidated"))),
    Case("trainer.gradient_clip_val", "Manual optimizes manually; leave it out, and clip in",
         {**one_group(of_class(f"{HERE}.Manual")), "trainer.gradient_clip_val": 1.0}),
    *(Case("model.clients.0.model", f"overrides {hook}, which no session calls",
           one_group(of_class(f"{HERE}.Has_{hook}"))) for hook in UNCALLED),
    Case("model.clients.0.model", "2 optimizers", one_group(of_class(f"{HERE}.TwoOptimizers"))),
    edit("model.optimizer.init_args.lr", float("nan"), "nan; give a finite number"),
    edit("model.optimizer.init_args.lr", -1, "learning rate: -1.0", named="model.optimizer"),
    Case("model.lr_schedule", "model.optimizer is not given",
         {"model.optimizer": GONE, "model.lr_schedule": of_class("StepLR", step_size=1)}),
    edit("model.lr_schedule", of_class("OneCycleLR", max_lr=0.1), "total_steps"),
    edit("model.lr_schedule", of_class("torch.optim.lr_scheduler.ReduceLROnPlateau"),
          "a function of the round"),
]  # fmt: skip

FLAGS = [
    edit("trainer.name", "a/b", "'a/b'; give a plain folder name"),
    edit("trainer.name", "..", "'..'; give a plain folder name"),
    edit("trainer.default_root_dir", "bad.yaml", "Not a directory"),
    edit("trainer.max_epochs", 0, "0 rounds"),
    edit("trainer.max_epochs", -2, "-2 rounds; give at least 1, or -1 for no limit"),
    edit("trainer.max_steps", 0, "0 rounds"),
    edit("trainer.max_time", "soon", "'soon'; write days:hours:minutes:seconds"),
    edit("trainer.max_time", "00:00:00:00", "give a time above 0"),
    edit("trainer.accelerator", "tpuu", "choose one of auto, cpu, gpu"),
    edit("trainer.devices", [0], "give the number of ranks"),
    edit("trainer.num_nodes", 0, "0; give at least 1"),
    edit("trainer.num_threads", 0, "0; give at least 1"),
    edit("trainer.check_val_every_n_epoch", 0, "0; give at least 1"),
    edit("trainer.gradient_clip_val", -1, "-1.0; give a limit above 0"),
    edit("trainer.limit_train_batches", 1.5, "1.5 is not a share"),
    edit("trainer.limit_train_batches", 0, "0; give at least 1"),
    edit("trainer.limit_val_batches", -1, "-1; give at least 0"),
    edit(
        "trainer.callbacks", [of_class("EarlyStopping", monitor="global/loss")] * 2, "EarlyStopping"
    ),
    edit("trainer.profiler", "stopwatch", "can only be one of ['simple'"),
]

DATA = [
    edit("data.batch_size", 0, "0; give at least 1"),
    edit("data.train_fraction", 2, "2.0; give a number between 0 and 1"),
    edit("data.validation", 1, "1.0; give a number from 0 to less than 1"),
    edit("data.unseen", 1, "1.0; give a share from 0 to less than 1"),
    edit("data.unseen", 0.9, "0.9, which leaves none of 3 clients to train"),
    edit("data.unseen", [7], "client 7 of 3; give 0 to 2"),
    edit("data.unseen", ["7"], "'7', and the data set knows no names of owners"),
    edit("model.unseen_epochs", 2, "2, and no client is unseen"),
    Case("data.unseen", "Standalone has no server", {
        "data.unseen": [0], "model.algorithm": "Standalone",
    }),
    edit(f"{PARTITION}.alpha", 0, "0.0 is not a concentration"),
    edit(f"{PARTITION}.min_size", 1000, "1000 samples for each of 3 clients, of 1437"),
    edit("data.partition", of_class("Classes", per_client=11), "the training set has 10",
          named=f"{PARTITION}.per_client"),
    edit("model.clients.1.count", 2000, "need a sample each", named="data.partition"),
    edit("data.dataset", of_class("MNIST", root="nowhere"), "nowhere/MNIST/raw",
          named="data.dataset.init_args.root"),
    edit("data.dataset", of_class("MNIST", root="corrupt"), "cannot be read",
          named="data.dataset.init_args.root"),
    edit("data.dataset", of_class("Digits", image_size=0), "0 pixels",
          named="data.dataset.init_args.image_size"),
    Case("data.last_batch", "a single sample", {"data.batch_size": 4, **hidden(4, 4, 4, 4)}),
    Case("data.batch_size", "a single sample", {"data.batch_size": 1, **hidden(4, 4, 4, 4)}),
    Case("data.batch_size", "a single sample",
         {"data.batch_size": 1, "model.local_steps": 2, **hidden(4, 4, 4, 4)}),
    Case("data.batch_size", "a single sample",
         {"data.batch_size": 1, "trainer.limit_train_batches": 2, **hidden(4, 4, 4, 4)}),
    Case("data.last_batch", "trains on a single sample", {
        "data.chunks": 400, "data.partition": "Iid", **hidden(4, 4, 4, 4),
    }),
    edit("data.chunks", 2000, "give at most"),
    edit("data.partition", of_class("Iid", parts=2), "2 parts for 3 clients",
         named=f"{PARTITION}.parts"),
    Case(f"{PARTITION}.min_size", "1000 samples for each", {f"{PARTITION}.min_size": 1000},
         command="partition"),
]  # fmt: skip

CLOUDS = [
    clouds("wait for 4 of 3 servers; give at least 1 and at most 3", wait=4),
    clouds("4 servers for 6 clients; give a divisor", servers=4),
    clouds("3 of the 2 devices of a server; give at most 2", active=3),
    clouds("gamma, 12, is 2.4; it must be less than 2", "server_lr",
           server_step="sum", server_lr=0.2, gamma=2),
    clouds("gamma, 4, is 1.2; it must be at most 1", "server_lr",
           server_step="sum", server_lr=0.3, gamma=2, wait=2),
    clouds("is 2.5; it must be less than 2", server_lr=2.5),
    clouds("row 0 sums to 1.1", mixing=[[0.6, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]),
    clouds("nowhere.npy", mixing="nowhere.npy"),
    clouds("0; give at least 1", steps=[0, 2]),
    clouds("[3, 2]; give 1 <= low <= high", steps=[3, 2]),
    Case("model.devices.delay.init_args.path", "delays from -1 to",
         cloud_of() | {"model.devices": {"delay": of_class("Trace", path="negative.txt")}}),
    Case("model.devices.table", "nowhere.csv cannot be read",
         {"model.devices": {"table": "nowhere.csv"}}),
    Case("model.policy.deadline", "but the fastest client needs",
         {"model.devices": {"up": 1.0}, "model.policy": {"deadline": 1.0}}),
    Case("model.policy", "given, but sessions take no time", {"model.policy": {"deadline": 1.0}}),
    Case("model.assign.deadline", "clients cannot train any model",
         {"model.devices": {"up": 1.0}, "model.assign": {"deadline": 1.0}}),
    Case("model.fraction", "model.algorithm.init_args.active says",
         cloud_of() | {"model.fraction": 0.5}),
    Case("model.local_epochs", "model.algorithm.init_args.steps says",
         cloud_of() | {"model.local_epochs": 2}),
    Case("model.optimizer.init_args.box", "[2.0, -2.0]; give low < high",
         cloud_of() | {"model.optimizer": of_class("ASPG", box=[2, -2])}),
    Case("model.optimizer.init_args.momentm", "did you mean momentum?",
         cloud_of() | {"model.optimizer": of_class("ASPG", momentm=1)}),
]  # fmt: skip

CHECKPOINTS = [
    Case("ckpt_path", "no file nowhere.ckpt", words=["--ckpt_path", "nowhere.ckpt"]),
    Case("ckpt_path", "no file runs", words=["--ckpt_path", "runs"]),
    Case("ckpt_path", "cannot be read", words=["--ckpt_path", "truncated.ckpt"]),
    Case("ckpt_path", "not written by lightfed", words=["--ckpt_path", "foreign.ckpt"]),
    Case("ckpt_path", "has format 99", words=["--ckpt_path", "newer.ckpt"]),
    Case("ckpt_path", "no run of this name has a checkpoint", words=["--ckpt_path", "last"],
         command="test"),
]  # fmt: skip

SMALL = of_class("lightfed.networks.MLP", hidden=[5])
SHARED = "model.algorithm.init_args.shared"


def method(name: str, key: str, fragment: str, **arguments: Any) -> Case:
    """An algorithm for clients of 4 and 2 features, and what it has to say."""
    return Case(key, fragment, {"model.algorithm": of_class(name, **arguments)})


METHODS = [
    method("PFedMoE", SHARED, "gives 5 features, but the client's gives 4", shared=SMALL),
    method("PFedMoE", "model.algorithm.init_args.gate_units", "0", shared=SMALL, gate_units=0),
    Case("data.last_batch", "trains on a single sample", {
        "model.algorithm": of_class("PFedMoE", shared=SMALL), "data.batch_size": 4,
        "model.clients": [{"count": 3, "model": SMALL}],
    }),
    method("FML", "model.algorithm.init_args.alpha", "2.0; give a share from 0 to 1",
           shared=SMALL, alpha=2),
    method("FedKD", "model.algorithm.init_args.energy", "give a share from 0 to 1", shared=SMALL,
           energy=[0.5, 2]),
    method("FedProto", "model.clients", "group a gives vectors of 4 numbers, group b of 2"),
    method("FD", "model.algorithm.init_args.weight", "-1.0; give a number of 0", weight=-1),
    method("FedAPEN", "model.algorithm.init_args.hold_out", "2.0; give a share", shared=SMALL,
           hold_out=2),
    method("FedAPEN", "model.algorithm.init_args.hold_out", "is all of what client", shared=SMALL,
           hold_out=0.9999),
    method("LGFedAvg", "model.clients", "are [10, 4], [10], those of group b [10, 2], [10]",
           global_layers=1),
]  # fmt: skip


PLACE = f"({own_code.__file__}:"


def own(path: str, fragment: str = "", /, **arguments: Any) -> Case:
    """Code of a user's own, and where its line says that it has failed."""
    name = of_class(f"{CODE}.{path}", **arguments)
    bases = {
        "data.dataset": Dataset,
        "model.algorithm": Algorithm,
        "trainer.callbacks": L.Callback,
        "model.lr_schedule": LRScheduler,
        "data.partition": Partitioner,
    }
    made = getattr(own_code, path)
    key = next((key for key, base in bases.items() if issubclass(made, base)), "model.clients")
    fragment = fragment or PLACE
    if key == "model.clients":
        return Case(key, fragment, one_group(name))
    edits = {key: [name] if key == "trainer.callbacks" else name}
    return Case(key, fragment, one_group(SMALL) | edits)


OWN = [
    own("Raises", f"the disk is on fire {PLACE}"),
    own("Missing", f"'nowhere.pt' {PLACE}"),
    own("Unmade"),
    own("Returns", "load returns NoneType, not Samples", what="None"),
    own("Returns", "load returns tuple", what="(x, y)"),
    own("Returns", "load returns list, Tensor, ", what="Samples(x.tolist(), y)"),
    own("Returns", "1436 samples, 1437 labels", what="Samples(x[1:], y)"),
    own("Returns", "sample 0 has the shape (8, 8)", what="Samples(x[:, 0], y)"),
    own("Unnamed", "no attribute 'classes'"),
    own("Normalised", "for 1 channels the means are (0.5, ", mean=[0.5] * 3, std=[0.5] * 3),
    own("Normalised", "the deviations (0.0,)", mean=[0.5], std=[0.0]),
    own("Transforms", f"KeyError: 'no transform' {PLACE}"),
    own("Deals"),
    own("ValidationRaises", f"ValueError: cannot validate {PLACE}"),
    own("LogsText", f"'loss' is 'low' {PLACE}"),
    own("LogsVector", "takes a number or a metric, and 'logits' is "),
    own("TrainsOthers", "2 parameters that are not those of TrainsOthers"),
    own("Rounds"),
    *(own("Calls", hook=hook) for hook in ("setup", "on_train_batch_end", "on_save_checkpoint")),
    Case("model.max_failed_clients", "takes a number or a metric",
         one_group(of_class(f"{CODE}.TrainingLogsVector"))),
    Case("model.lr_schedule", f"KeyError: 'rate' {PLACE}",
         {"model.lr_schedule": of_class(f"{CODE}.Falls"), "trainer.max_epochs": 3}),
]  # fmt: skip

LET_THROUGH = [
    Case("-x", "no such key", words=["-x"]),
    *(edit("trainer.callbacks", value, "", named="trainer.callbacks")
      for value in ("x", [{}], [None])),
    edit("trainer.name", "x" * 300, "File name too long", named="trainer.default_root_dir"),
    *(edit(key, value, "") for key in ("model.algorithm", "model.lr_schedule", MODEL)
      for value in (3, [], {})),
    edit("model.lr_schedule", of_class("CosineAnnealingLR"), "T_max",
         named="model.lr_schedule"),
    Case("model.lr_schedule", "round 2: integer modulo by zero",
         {"model.lr_schedule": of_class("StepLR", step_size=0), "trainer.max_epochs": 3}),
    edit("model.eval_clients", 7, "7 of 3 clients"),
    edit("model.clients.1.model.init_args.hidden", [-1], "give sizes above 0", named=MODEL),
    edit("model.clients.1.model.init_args.hidden", None, "no value"),
    edit("model.optimizer.init_args.lr", None, "no value"),
    edit("trainer.strategy",
         of_class("lightfed.engine.strategy.FederatedStrategy", timeout=float("inf")),
         "give a finite number", named="trainer.strategy.init_args.timeout"),
    clouds("no value", servers=None),
    edit("model.algorithm", of_class("FedProx", mu=float("inf")), "give a finite number",
         named="model.algorithm.init_args.mu"),
    method("PFedMoE", SHARED, "Flatten: no linear layer", shared=of_class("torch.nn.Flatten")),
    method("FedKD", "model.algorithm.init_args.rounds", "give at least 1", shared=SMALL, rounds=0),
    edit("trainer.plugins", ["nothing"], "invalid type for plugin nothing"),
    edit("trainer.plugins",
         [of_class("lightning.pytorch.plugins.precision.DoublePrecision")], "DoublePrecision"),
]  # fmt: skip

DELAYS = {
    "Exponential": {"mean": 0}, "Weibull": {"scale": 1, "shape": 1e-9},
    "LogNormal": {"mu": 0, "sigma": -1}, "Uniform": {"low": 2, "high": 1},
    "Constant": {"value": -1},
}  # fmt: skip
HELD = """
model: &m
  algorithm: FedAvg
  clients: [*m]
"""
DEEP = "model: " + "[" * 3000 + "]" * 3000
SHAPELESS = f"{__name__}.Lazy"


class Lazy(torch.nn.Module):
    """A network without sizes."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer = torch.nn.LazyLinear(num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


# Unknown keys that hold nothing: the parser drops them without a word.
NOTHING = (
    "nothing",
    "trainer.nothing",
    "data.nothing",
    "model.clients.0.nothing",
    "model.clients.1.model.init_args.nothing",
    "model.optimizer.init_args.nothing",
    "data.partition.init_args.nothing",
)
GROUP = '{"count": 1, "level": "a", "model": {"class_path": "Conv"}, "nothing": {}}'
IN_WORDS = {
    "model.nothing": ['--model={"nothing": {}}'],
    "model.clients.0.nothing": ["--model.clients.0.nothing={}"],
    "model.clients.nothing": [f"--model.clients+={GROUP}"],
    "model.algorithm.nothing": ["--model.algorithm.nothing={}"],
    "data.partition.init_args.nothing": ["--data.partition.init_args.nothing={}"],
    "data.nothing": ["--config", '{"data": {"nothing": {}}}'],
}
BESIDE = ("model.clients.0.model", "model.optimizer", "data.partition")
STOPS = of_class("EarlyStopping", monitor="global/loss")

# The answers of a list of a thousand wrong inputs that were no line, or did not name the key.
MALFORMED = [
    *(edit(key, value, "no such key") for key in NOTHING for value in ({}, {"x": {"y": {}}})),
    *(Case(key, "no such key", words=words) for key, words in IN_WORDS.items()),
    *(edit(f"{key}.nothing", 1, "no such key beside class_path") for key in BESIDE),
    Case(
        "trainer.callbacks.0.nothing", "beside class_path",
        {"trainer.callbacks": [STOPS | {"nothing": {}}]},
    ),
    Case(
        "trainer.callbacks.0.init_args.nothing", "no such key",
        {"trainer.callbacks": [of_class("EarlyStopping", monitor="global/loss", nothing={})]},
    ),
    edit("trainer.max_time", "", "''; write days"),
    Case("data.batch_size", "[1,", words=["--data.batch_size=[1,"]),
    Case("model.clients.0.count", "not YAML", words=["--model.clients.0.count", "[1,"]),
    Case("--config", "", text="trainer:\n\t- x\n", words=["--model.seed", "1"]),
    Case("--config", "bad.yaml contains itself", text=HELD),
    Case("--config", "bad.yaml is nested too deeply", text=DEEP),
    edit("model.algorithm", {"class_path": "FedAvg", "dict_kwargs": {"mu": 1}},
         "no such argument of FedAvg", named="model.algorithm.dict_kwargs.mu"),
    *(edit("model.devices", {"delay": of_class(name, **arguments)}, "give a number above",
           named=f"model.devices.delay.init_args.{list(arguments)[-1]}")
      for name, arguments in DELAYS.items()),
    Case("model.clients.0.model.init_args.hidden", "",
         one_group(of_class("lightfed.networks.PreActResNet", hidden=[]))
         | {"model.clients": [{"count": 2, "model": of_class("lightfed.networks.PreActResNet",
                                                             hidden=[])}]}),
    Case("model.clients.0.model", "is lazy", one_group(SHAPELESS)),
    method("DisPFL", "model.algorithm.init_args.density", "an empty list", density=[]),
    method("DisPFL", "model.algorithm.init_args.rounds", "give at least 1", rounds=0),
    method("DisPFL", "model.algorithm.init_args.rounds", "give at least 1", rounds=-1),
    method("PFedMoE", "model.algorithm.init_args.gate_lr", "give a number of 0", shared=SMALL,
           gate_lr=-1),
    method("FedAPEN", "model.algorithm.init_args.share_lr", "give a number of 0", shared=SMALL,
           share_lr=-1),
    method("FedAPEN", "model.algorithm.init_args.passes", "give 0 or more", shared=SMALL,
           passes=-1),
    method("MaxCommon", "model.algorithm.init_args.max_common_layers", "give 0 or more",
           max_common_layers=-1),
    *(edit("trainer.callbacks", [of_class(name, monitor="nothing")], "nothing")
      for name in ("EarlyStopping", "ModelCheckpoint")),
]  # fmt: skip

ALL = [
    *OWN,
    *MALFORMED,
    *METHODS,
    *UNKNOWN_KEYS,
    *WRONG_VALUES,
    *NO_CLASSES,
    *MISSING,
    *FILES,
    *FEDERATIONS,
    *FLAGS,
    *DATA,
    *CLOUDS,
    *CHECKPOINTS,
    *LET_THROUGH,
]
