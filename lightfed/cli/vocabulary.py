"""What a configuration may say, read from the signatures: keys, values, names of classes."""

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.federation import Federation
from lightfed.engine.trainer import FederatedTrainer
from lightfed.previews.trainer import PreviewTrainer

SECTIONS: dict[str, type] = {
    "trainer": FederatedTrainer,
    "model": Federation,
    "data": FederatedDataModule,
}

# Modules whose public classes are offered where a key names a class.
_OFFERED = (
    "lightfed.algorithms.",
    "lightfed.topology.",
    "lightfed.simulation.delays.",
    "lightfed.data.",
    "lightfed.engine.strategy.",
    "torch.optim.",
    "lightning.pytorch.callbacks.",
    "lightning.pytorch.loggers.",
)

# Keys that users of Lightning will try: why they do not exist, what to do instead.
ABSENT: dict[str, tuple[str, str]] = {
    "trainer.accumulate_grad_batches": (
        "a session takes one step a batch",
        "set a larger data.batch_size",
    ),
    "trainer.barebones": (
        "a session is bare already",
        "set trainer.logger, trainer.enable_progress_bar and trainer.enable_checkpointing to false",
    ),
    "trainer.enable_autolog_hparams": (
        "the whole configuration is in the run folder",
        "read its config.yaml",
    ),
    "trainer.inference_mode": ("evaluation never keeps gradients", "leave it out"),
    "trainer.limit_predict_batches": (
        "there is no `predict`",
        "use trainer.limit_test_batches with `lightfed test`",
    ),
    "trainer.log_every_n_steps": ("metrics are written once a round", "leave it out"),
    "trainer.min_steps": ("a step of the server is a round", "use trainer.min_epochs"),
    "trainer.model_registry": (
        "checkpoints are files of a run",
        "give ckpt_path the path of one, or `last`",
    ),
    "trainer.num_sanity_val_steps": (
        "there is no validation before the first round",
        "run `lightfed validate` first",
    ),
    "trainer.overfit_batches": (
        "training and test samples are kept apart",
        "use trainer.limit_train_batches",
    ),
    "trainer.reload_dataloaders_every_n_epochs": (
        "clients keep their samples for the whole run",
        "leave it out",
    ),
    "trainer.sync_batchnorm": (
        "clients share no batch; algorithms say what becomes of statistics",
        "see the algorithm's own arguments, such as model.algorithm.init_args.buffers of FedAvg",
    ),
    "trainer.use_distributed_sampler": (
        "the partition says who trains on what",
        "use data.partition",
    ),
    "trainer.val_check_interval": (
        "evaluation is between rounds",
        "use trainer.check_val_every_n_epoch",
    ),
    "seed_everything": ("nothing is drawn from global random state", "use model.seed"),
    "optimizer": ("optimisers belong to the clients", "use model.optimizer"),
    "lr_scheduler": ("the schedule is over rounds", "use model.lr_schedule"),
    "model.class_path": ("the model is always a federation", "put its arguments right below model"),
    "model.init_args": ("the model is always a federation", "put its arguments right below model"),
    "data.class_path": ("data are always federated", "name the data set: data.dataset"),
    "data.init_args": ("data are always federated", "put the arguments right below data"),
}


def arguments(owner: Any) -> dict[str, Any]:
    """What a class or function takes, by name, with the annotations."""
    try:
        hints = get_type_hints(owner.__init__ if inspect.isclass(owner) else owner)
    except (NameError, TypeError):
        hints = {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(owner).parameters.values()
    return {p.name: hints.get(p.name, p.annotation) for p in parameters if p.kind not in variadic}


def required(owner: Any) -> list[str]:
    """Those of the arguments that have no default."""
    defaults = {p.name: p.default for p in inspect.signature(owner).parameters.values()}
    return [name for name in arguments(owner) if defaults[name] is inspect.Parameter.empty]


def keys() -> list[str]:
    """All keys of the sections, and those beside them."""
    inner = [f"{name}.{key}" for name, owner in SECTIONS.items() for key in arguments(owner)]
    return [*inner, *SECTIONS, "ckpt_path", "config", "rounds", "verbose", "world_size"]


def annotation(key: str) -> Any:
    """Of a key of a section, or of `lightfed plan`; `inspect.Parameter.empty` for others."""
    section, _, name = key.partition(".")
    if key in ("world_size", "rounds"):
        return arguments(PreviewTrainer.plan)[key]
    owner = SECTIONS.get(section)
    return arguments(owner).get(name, inspect.Parameter.empty) if owner else inspect.Parameter.empty


def closest(name: str, names: list[str]) -> str | None:
    """The name that was probably meant."""
    found = get_close_matches(name, names, n=1)
    return found[0] if found else None


def described(wanted: Any) -> str | None:
    """An annotation in words; None if it has none."""
    plain = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", "")
    if name in plain:
        return plain[name]
    if wanted is type(None):
        return "null"
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin is Literal:
        return "one of " + ", ".join(dict.fromkeys(str(part) for part in parts))
    if _is_union(wanted):
        choices = [described(part) for part in parts]
        return " or ".join(dict.fromkeys(c for c in choices if c)) or None
    if (item := item_of(wanted)) is not None:
        words = described(item)
        return f"a list, each {words}" if words else "a list"
    if is_dataclass(base := base_of(wanted)):
        return f"a mapping with {', '.join(required(base))}"
    return f"a class ({base.__name__})" if base else None


def item_of(wanted: Any) -> Any:
    """The annotation of a list's items, also where a list is one of several choices; or None."""
    if _is_union(wanted):
        return next((i for i in map(item_of, get_args(wanted)) if i is not None), None)
    origin = get_origin(wanted)
    if not (inspect.isclass(origin) and hasattr(origin, "__iter__")) or origin is dict:
        return None
    return get_args(wanted)[0]


def base_of(wanted: Any) -> type | None:
    """The class of what a key names by `class_path`; None where it names nothing."""
    if _is_union(wanted):
        return next((b for b in map(base_of, get_args(wanted)) if b is not None), None)
    if get_origin(wanted) is not None:
        return base_of(get_args(wanted)[-1]) if get_origin(wanted) is Callable else None
    named = inspect.isclass(wanted) and wanted.__module__ not in ("builtins", "datetime", "typing")
    return wanted if named else None


def offered(base: type) -> list[str]:
    """Short names of the classes that a key of this class takes."""
    where = ("lightfed.models.",) if base is nn.Module else _OFFERED
    found = {c.__name__ for c in _subclasses(base) if _is_offered(c, where)}
    return sorted(found, key=str.lower)


def _is_union(wanted: Any) -> bool:
    return get_origin(wanted) in (Union, types.UnionType)


def _subclasses(base: type) -> Iterator[type]:
    child: type
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)


def _is_offered(candidate: type, where: tuple[str, ...]) -> bool:
    hidden = candidate.__name__.startswith("_") or inspect.isabstract(candidate)
    if hidden or not f"{candidate.__module__}.".startswith(where):
        return False
    layer = ".models." in candidate.__module__ and "num_classes" not in arguments(candidate)
    return not layer
