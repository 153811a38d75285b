"""The loaders of a LightningDataModule: which settings of them a run does not follow.

Samples are read once from the loaders' data sets. A run makes batches of its own, by the settings
of the data module of lightfed.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils import data as torch_data

from lightfed.data.dataset import KEY, Split
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import is_overridden

# What leaves samples as they are, and whole. Sessions shuffle, so the order does not matter.
_SAMPLERS_OF_ALL = (torch_data.SequentialSampler, torch_data.RandomSampler)
_BATCH_SAMPLERS = (torch_data.BatchSampler,)
_COLLATE_FUNCTIONS = (torch_data.default_collate, torch_data.default_convert)

# Settings of a loader that only say how samples are read, and their defaults.
_READING = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}


def loader_of(module: LightningDataModule, split: Split) -> Any:
    """Return a data module's loader of the samples to train or to test with.

    Raises:
        UserError: If there is none, or it selects or changes samples.
    """
    name = f"{split}_dataloader"
    fix = "define one, with a data set of its own"
    if not is_overridden(name, module):
        raise UserError(key=f"{KEY}.train", found=f"{type(module).__name__} has no {name}", fix=fix)
    loader = getattr(module, name)()
    if loader is None:
        raise UserError(key=f"{KEY}.train", found=f"its {name} returns None", fix=fix)
    return loader


def check_loader(loader: Any, split: Split) -> None:
    """Refuse a loader that gives other samples than those of its data set.

    Raises:
        UserError: It names what selects or changes samples on their way through the loader.
    """
    obstacle = _what_changes_samples(loader)
    if obstacle is not None:
        raise UserError(
            key=f"{KEY}.train",
            found=f"its {split} loader has a {obstacle}",
            fix="do it in the data set, such as a torch.utils.data.Subset, or in a transform",
        )


def _what_changes_samples(loader: Any) -> str | None:
    """Return the name of what selects or changes samples; None if nothing does."""
    if not isinstance(loader, torch_data.DataLoader):
        return type(loader).__name__

    batch_sampler = loader.batch_sampler
    if batch_sampler is not None and type(batch_sampler) not in _BATCH_SAMPLERS:
        return type(batch_sampler).__name__

    sampler = getattr(batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, _SAMPLERS_OF_ALL):
        return type(sampler).__name__

    if loader.collate_fn not in _COLLATE_FUNCTIONS:
        return "collate_fn"
    return None


def settings_not_followed(split: Split, loader: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of a loader that a run does not follow, each with the key that does it.

    Args:
        split: Which samples the loader gives.
        loader: The loader.
        settings: The settings of the data module of lightfed, by the names of its arguments.
    """
    is_train = split == "train"
    setting = "batch_size" if is_train else "eval_batch_size"
    batches = loader if loader.batch_sampler is None else loader.batch_sampler
    sampler = batches.sampler

    unused = []
    if batches.batch_size != settings[setting]:
        unused.append(
            f"batch_size={batches.batch_size} ({split}; data.{setting} is {settings[setting]})"
        )

    last_batch = settings["last_batch"]
    is_dropped = is_train and last_batch == "drop"
    if batches.drop_last and not is_dropped:
        instead = f"data.last_batch is {last_batch}" if is_train else "all count"
        unused.append(f"drop_last=True ({split}; {instead})")

    if is_train and isinstance(sampler, torch_data.SequentialSampler):
        unused.append("shuffle=False (train; sessions shuffle)")
    if getattr(sampler, "replacement", False) or len(sampler) != len(loader.dataset):
        unused.append(f"a sampler of a part ({split}; an epoch has every sample once)")

    for name, default in _READING.items():
        if getattr(loader, name, default) != default:
            unused.append(f"{name} ({split}; samples are read once)")
    return unused
