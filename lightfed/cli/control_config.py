"""The configuration of a control string of HeteroFL, with the data set's settings."""

from dataclasses import dataclass, replace
from typing import Any

from lightfed.cli.control_string import Control
from lightfed.utils.errors import UserError


@dataclass(frozen=True)
class Setting:
    """The released code's hyper-parameters of a data set, which control strings do not contain.

    Attributes:
        model: class of the clients' models.
        fixed: its non-default arguments.
        lr: initial learning rate; divided by ten at each milestone.
        rounds: for IID; twice as many otherwise.
        milestones: rounds for IID; twice as late otherwise.
        local_epochs: of a session.
        batch: samples of a training batch, and of one in evaluation.
        rows: a client is a row of a text, so there is only one split.
        files: the data set is read from files below `root`.
        dataset: class of the data set, if it differs from the setting's name.
    """

    model: str
    lr: float
    rounds: int
    milestones: tuple[int, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    local_epochs: int = 5
    batch: tuple[int, int] = (10, 50)
    rows: bool = False
    files: bool = True
    dataset: str = ""


_CONV = Setting("Conv", 0.01, 200, (100,))
# The blocks are those of the paper's table; the released code has 2, 2, 2, 2.
_RESNET = Setting("PreActResNet", 0.1, 400, (150, 250), fixed=(("blocks", (1, 1, 1, 2)),))
# torch.nn has a class of that name, too.
_TRANSFORMER = "lightfed.models.Transformer"
_TEXT = Setting(_TRANSFORMER, 0.1, 200, (50, 100), local_epochs=1, batch=(1, 10), rows=True)
_SMALL = (("embedding", 128), ("hidden", 256), ("layers", 2))
SETTINGS = {
    "MNIST": _CONV,
    "MNIST-ResNet": replace(_CONV, model=_RESNET.model, fixed=_RESNET.fixed, dataset="MNIST"),
    "CIFAR10": _RESNET,
    "WikiText2": _TEXT,
    # The embedded data sets, with hyper-parameters of our own.
    "Digits": replace(_CONV, lr=0.03, rounds=60, milestones=(40,), files=False),
    "Prose": replace(_TEXT, fixed=_SMALL, rounds=60, milestones=(40,), files=False),
}


def configuration(control: Control, data: str) -> dict[str, Any]:
    """The configuration of a control string; a UserError if the data set has no such split."""
    setting = setting_of(data)
    later = 1 if control.classes is None else 2
    schedule = {"milestones": [later * t for t in setting.milestones], "gamma": 0.1}
    sgd = {"lr": setting.lr, "momentum": 0.9, "weight_decay": 0.0005}
    algorithm: dict[str, Any] = {}
    if control.dynamic:
        weights = [weight for _, weight in control.modes]
        algorithm = {"assignment": "dynamic", "level_weights": weights}
    algorithm |= {} if control.mask else {"mask": False}
    model: dict[str, Any] = {
        "algorithm": _named("HeteroFL", algorithm) if algorithm else "HeteroFL",
        "clients": _client_groups(control, setting),
        "optimizer": _named("torch.optim.SGD", sgd),
        "lr_schedule": _named("torch.optim.lr_scheduler.MultiStepLR", schedule),
        "fraction": control.fraction,
        "local_epochs": setting.local_epochs,
    }
    trainer: dict[str, Any] = {"max_epochs": later * setting.rounds, "check_val_every_n_epoch": 10}
    trainer["gradient_clip_val"] = 1.0
    model |= {"evaluate": ["global"]} if setting.rows else {}
    return {"trainer": trainer, "model": model, "data": _data(control, data, setting)}


def setting_of(data: str) -> Setting:
    """The settings of a data set; a UserError if there are none."""
    if data not in SETTINGS:
        raise UserError("control.data", repr(data), f"give one of {', '.join(SETTINGS)}")
    return SETTINGS[data]


def _client_groups(control: Control, setting: Setting) -> list[dict[str, Any]]:
    """The client groups, one per level; the first has the level of the global model."""
    arguments: dict[str, Any] = {
        n: list(v) if isinstance(v, tuple) else v for n, v in setting.fixed
    }
    if not setting.rows:
        arguments |= {} if control.norm == "bn" else {"norm": control.norm}
        arguments |= {} if control.scale else {"scaler": False}
    model = _named(setting.model, arguments)
    return [
        {"count": count, "level": level, "model": model}
        for (level, _), count in zip(control.modes, control.counts, strict=True)
    ]


def _data(control: Control, data: str, setting: Setting) -> dict[str, Any]:
    if setting.rows and control.classes is not None:
        found = f"'non-iid-{control.classes}', where a client of {data} is a row of its text"
        raise UserError("control.split", found, "give iid")
    arguments: dict[str, Any] = {"root": "data"} if setting.files else {}
    arguments |= {"rows": control.users} if setting.rows and control.users != 100 else {}
    dataset = setting.dataset or data
    partition: Any = "Natural" if setting.rows else "Iid"
    if control.classes is not None:
        partition = _named("Classes", {"per_client": control.classes, "strict_paper": True})
    batch, evaluated = setting.batch
    return {
        "dataset": _named(dataset, arguments) if arguments else dataset,
        "partition": partition,
        "batch_size": batch,
        "eval_batch_size": evaluated,
        **({} if setting.files else {} if setting.rows else {"last_batch": "join"}),
    }


def _named(path: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": path} | ({"init_args": arguments} if arguments else {})
