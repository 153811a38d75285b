"""Tables of samples: what Hugging Face `datasets` loads, from its hub, its cache or a path."""

import json
import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from lightfed.data.datasets.dataset import KEY
from lightfed.utils.counts import largest_remainder
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import numpy_generator

AUDIO = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")
_FORMATS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".tsv": "csv",
}

Table = Any  # datasets.Dataset: the package takes two seconds to import


def open_table(
    path: str, split: str, *, key: str, name: str | None = None, root: str = "path"
) -> Table:
    """A split of a data set, memory-mapped; for `path` and `split` see `Hub`.

    A file's only split is `train`. `key` and `root` are what the user calls split and path, and
    `name` is the configuration of a data set of the hub with several. A UserError names the path or
    the split, with the reason on one line.
    """
    local = Path(path).expanduser()
    if not local.exists() and (local.suffix in _FORMATS or path.startswith(("/", ".", "~"))):
        fix = "give a file, a folder, or a name of the hub"
        raise UserError(f"{KEY}.{root}", f"{path} is not there", fix)
    try:
        return _open(local if local.exists() else None, path, split, name)
    except Exception as error:  # a format can raise anything
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
        why = reason(cause or error)
        if re.search("split|instruction", why) and isinstance(error, (KeyError, ValueError)):
            fix = "name one that there is, or part of one, as `train[:80%]`; or hold out test: 0.2"
            raise UserError(f"{KEY}.{key}", f"{path} has no {split!r} ({why})", fix) from error
        fix = "check the name; without a network, give a path, or a name that is in the cache"
        raise UserError(f"{KEY}.{root}", f"{path} cannot be loaded ({why})", fix) from error


def require_apart(train: Table, *, splits: tuple[str, str]) -> None:
    """Reject a test split that shares samples with the training split, which is `train`."""
    from datasets import ReadInstruction

    shared = splits[0] == splits[1]
    with suppress(ValueError):  # not all sources count the samples of their splits
        counts = {name: split.num_examples for name, split in (train.info.splits or {}).items()}
        ours, theirs = (ReadInstruction.from_spec(s).to_absolute(counts) for s in splits)
        shared = any(
            one.splitname == other.splitname
            and max(one.from_ or 0, other.from_ or 0)
            < min(part.to or counts[part.splitname] for part in (one, other))
            for one, other in product(ours, theirs)
        )
    found = f"{splits[1]}, which has samples of the training split, {splits[0]}"
    fix = "name another one, or parts such as train[:80%] and train[80%:]"
    require(not shared, f"{KEY}.test", found, fix)


def texts_of(folder: Path, split: str, *columns: str) -> list[list[Any]]:
    """Columns of a split of a folder of the hub: `text`, and others of whole numbers.

    A UserError names `root`, the column and the first value that is missing or of another type.
    """
    table = open_table(str(folder), split, key="root", root="root")
    for name in columns:
        kind, found = str if name == "text" else int, f"{folder}: {split} has no column {name!r}"
        if name in table.column_names:
            values = enumerate(table[name])
            bad = next(((i, value) for i, value in values if not isinstance(value, kind)), None)
            found = "" if bad is None else f"{folder}: {name} of sample {bad[0]} is {bad[1]!r}"
        require(not found, f"{KEY}.root", found, "point root at the published files")
    return [table[name][:] for name in columns]


def _open(local: Path | None, path: str, split: str, name: str | None) -> Table:
    import datasets

    datasets.disable_progress_bars()
    for package in ("datasets", "huggingface_hub"):
        logging.getLogger(package).setLevel(logging.CRITICAL)  # what fails is raised, too
    if local is None:
        return datasets.load_dataset(path, name, split=split)
    if local.is_file():
        options = {"sep": "\t"} if local.suffix == ".tsv" else {}
        files = {"train": str(local)}
        kind = _FORMATS.get(local.suffix, local.suffix)
        return datasets.load_dataset(kind, data_files=files, split=split, **options)
    if (local / "dataset_dict.json").is_file():
        return _only(dict(datasets.load_from_disk(local)), split)
    if (local / "state.json").is_file():
        return _only({"train": datasets.load_from_disk(local)}, split)
    kind = _kind(local)
    if kind == "leaf":
        splits = {path.name: path for path in local.iterdir() if path.is_dir()}
        return datasets.Dataset.from_dict(_leaf(sorted(_only(splits, split).glob("*.json"))))
    if kind == "audio":
        return _recordings(local, split)
    return datasets.load_dataset(str(local), name, split=split)


def _only(splits: dict[str, Any], split: str) -> Any:
    if split not in splits:
        raise KeyError(f"unknown split, there is {', '.join(splits) or 'none'}")
    return splits[split]


def _kind(folder: Path) -> str:
    """Whether a folder holds LEAF's files, recordings, or what `datasets` recognises."""
    files = (path for path in folder.rglob("[!.]*") if path.suffix)
    top = sorted(path.suffix for path in folder.iterdir())
    first = None if set(top) & set(_FORMATS) else next(files, None)
    if first is not None and first.suffix == ".json":
        with first.open("rb") as file:
            return "leaf" if b'"users"' in file.read(64) else "table"
    return "audio" if first is not None and first.suffix.lower() in AUDIO else "table"


def _leaf(files: Iterable[Path]) -> dict[str, list[Any]]:
    """The columns x, y and user of files of the LEAF benchmark (Caldas et al. 2018)."""
    columns: dict[str, list[Any]] = {"x": [], "y": [], "user": []}
    for file in files:
        for user, samples in json.loads(file.read_bytes())["user_data"].items():
            columns["x"] += samples["x"]
            columns["y"] += samples["y"]
            columns["user"] += [user] * len(samples["y"])
    return columns


def _recordings(folder: Path, split: str) -> Table:
    """Paths and classes of FOLDER/[SPLIT/]CLASS/*.wav.

    Not by the audio folder of `datasets`, which needs FFmpeg even for paths.
    """
    import datasets
    from torchvision.datasets.folder import find_classes, make_dataset

    splits = {path.name: path for path in folder.iterdir() if path.is_dir()}
    root = _only(splits if "train" in splits else {"train": folder}, split)
    names, index = find_classes(root)
    files = make_dataset(str(root.resolve()), index, extensions=AUDIO)
    features = {"audio": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    columns = {"audio": [path for path, _ in files], "label": [label for _, label in files]}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def hold_out(table: Table, share: float, label: str) -> tuple[Table, Table]:
    """A table without a share of its samples, and these; always the same ones.

    The share is that of every class, up to rounding. A class of one sample is trained on, unless
    all are.
    """
    from sklearn.model_selection import train_test_split

    index, labels = np.arange(len(table)), table[label][:]
    try:
        train, test = train_test_split(index, test_size=share, random_state=0, stratify=labels)
    except (TypeError, ValueError):  # what is no label, a class of one sample, or many classes
        classes = np.unique(np.array(labels, dtype=str), return_inverse=True)[1]
        sizes = np.bincount(classes)
        wanted = largest_remainder(sizes, ceil(share * len(table)))
        held = np.minimum(wanted, sizes - (sizes.max() > 1))
        order = numpy_generator(0, "hold-out of a table").permutation(index)
        order = order[np.argsort(classes[order], kind="stable")]
        place = index - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of a sample in its class
        tested = place < np.repeat(held, sizes)
        train, test = order[~tested], order[tested]
    return table.select(np.sort(train)), table.select(np.sort(test))
