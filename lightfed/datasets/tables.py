"""Tables of samples: what Hugging Face `datasets` loads, from its hub, its cache or a path."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightfed.data.dataset import KEY, Split
from lightfed.utils.errors import UserError, reason, require

_FORMATS = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv")

Table = Any  # datasets.Dataset: the package takes two seconds to import


def open_table(path: str, split: str, *, key: str, name: str | None = None) -> Table:
    """A split of a data set, memory-mapped; for `path` and `split` see `Hub`.

    A file's only split is `train`. `key` is what the user calls the split, and `name` is the
    configuration of a data set of the hub with several. A UserError names the path or the split,
    with the reason on one line.
    """
    local = Path(path).expanduser()
    if not local.exists() and (local.suffix in _FORMATS or path.startswith(("/", ".", "~"))):
        fix = "give a file, a folder, or a name of the hub"
        raise UserError(f"{KEY}.path", f"{path} is not there", fix)
    try:
        return _open(local if local.exists() else None, path, split, name)
    except Exception as error:  # a format can raise anything
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
        why = reason(cause or error)
        if re.search("split|instruction", why) and isinstance(error, (KeyError, ValueError)):
            fix = "name one that there is, or part of one, as `train[:80%]`; or hold out test: 0.2"
            raise UserError(f"{KEY}.{key}", f"{path} has no {split!r} ({why})", fix) from error
        fix = "check the name; without a network, give a path, or a name that is in the cache"
        raise UserError(f"{KEY}.path", f"{path} cannot be loaded ({why})", fix) from error


def open_splits(
    path: str, train: str, test: float | str, by: Callable[[Table], str], name: str | None = None
) -> dict[Split, Table]:
    """The training and the test split, both with samples.

    If `test` is a share, it is held out of the training split, always the same samples. The share
    is that of every value in the column `by(table)`, up to rounding, if each value occurs twice.
    """
    whole = open_table(path, train, key="train", name=name)
    if isinstance(test, str):
        (one, part), (other, tested) = (spec.partition("[")[::2] for spec in (train, test))
        shared = one == other and (part == tested or not (part and tested))
        found = f"{test}, which has samples of the training split, {train}"
        fix = "name another one, or parts such as train[:80%] and train[80%:]"
        require(not shared, f"{KEY}.test", found, fix)
        splits = {"train": whole, "test": open_table(path, test, key="test", name=name)}
    else:
        fix = "name a split, or give a share such as 0.2"
        require(0 < test < 1, f"{KEY}.test", test, fix)
        require(len(whole) > 1, f"{KEY}.train", f"{len(whole)} samples", "give at least two")
        splits = dict(zip(("train", "test"), _held_out(whole, test, by(whole)), strict=True))
    for split, table in splits.items():
        require(len(table) > 0, f"{KEY}.{split}", "no samples", "name a split that has some")
    return splits  # type: ignore[return-value]


def column_of(table: Table, name: str | None, key: str) -> str:
    """The name of a column, if a table has it; else a UserError for this key."""
    names = list(table.column_names)
    found = f"{name or 'none given'}, the columns are {', '.join(names)}"
    require(name in names, f"{KEY}.{key}", found, "name one of them")
    return str(name)


def texts_of(table: Table, column: str, split: Split) -> list[str]:
    """The texts in a column; a UserError names the first sample that has none."""
    texts: list[str] = table[column][:]
    bad = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
    found = "" if bad is None else f"{split}: sample {bad} has {texts[bad]!r}"
    require(bad is None, f"{KEY}.text", found, "give a text")
    return texts


def coded(
    tables: Mapping[Split, Table], column: str, key: str, *, trained: bool
) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
    """The distinct values of a column, and their numbers 0, 1, ... for each split, (N,) int64.

    Values of the training split come first, those of a split in ascending order. A column of named
    classes keeps its own; in another split these may have other numbers, so names count. If
    `trained`, others than those of the training split have no number. A UserError for `key` names
    the first value that has none.
    """
    values = {split: _values(table, column) for split, table in tables.items()}
    names = list(getattr(tables["train"].features[column], "names", None) or ())
    for own in [] if names else [values["train"]] if trained else values.values():
        whole = [value for value in own if isinstance(value, float) and value % 1 == 0]
        known = {*whole, *(value for value in own if isinstance(value, (str, int)))}
        names += sorted(known - set(names))
    numbers, codes = {name: number for number, name in enumerate(names)}, {}
    for split, own in values.items():
        strange = (isinstance(value, list | dict) or value not in numbers for value in own)
        bad = next((i for i, found in enumerate(strange) if found), None)
        if bad is not None:
            found = f"{split}: sample {bad} has {own[bad]!r}, no name that training samples have"
            fix = "give whole numbers or words, and train on samples of every class"
            raise UserError(f"{KEY}.{key}", found, fix)
        codes[split] = torch.tensor([numbers[value] for value in own])
    return tuple(map(str, names)), codes


def _values(table: Table, column: str) -> list[Any]:
    values, names = table[column][:], getattr(table.features[column], "names", None) or ()
    return [names[v] if v in range(len(names)) else v for v in values] if names else values


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
        kind = {".jsonl": "json", ".tsv": "csv"}.get(local.suffix, local.suffix[1:])
        return datasets.load_dataset(kind, data_files=files, split=split, **options)
    if (local / "dataset_dict.json").is_file():
        return _only(dict(datasets.load_from_disk(local)), split)
    if (local / "state.json").is_file():
        return _only({"train": datasets.load_from_disk(local)}, split)
    leaf = next(local.glob("[!.]*/*.json"), None)
    if leaf is not None and b'"users"' in leaf.read_bytes()[:64]:
        splits = {path.name: path for path in local.iterdir() if path.is_dir()}
        return datasets.Dataset.from_dict(_leaf(sorted(_only(splits, split).glob("*.json"))))
    return datasets.load_dataset(str(local), name, split=split)


def _only(splits: dict[str, Any], split: str) -> Any:
    if split not in splits:
        raise KeyError(f"unknown split, there is {', '.join(splits) or 'none'}")
    return splits[split]


def _leaf(files: Iterable[Path]) -> dict[str, list[Any]]:
    """The columns x, y and user of files of the LEAF benchmark (Caldas et al. 2018)."""
    users = [pair for file in files for pair in json.loads(file.read_bytes())["user_data"].items()]
    columns = {key: [value for _, own in users for value in own[key]] for key in ("x", "y")}
    return columns | {"user": [user for user, own in users for _ in own["y"]]}


def _held_out(table: Table, share: float, by: str) -> tuple[Table, Table]:
    """A table without a share of its samples, and these."""
    from sklearn.model_selection import train_test_split

    index = np.arange(len(table))
    try:
        parts = train_test_split(index, test_size=share, random_state=0, stratify=table[by][:])
    except (TypeError, ValueError):  # what is no label, a value that occurs once, or many values
        parts = train_test_split(index, test_size=share, random_state=0)
    train, test = (table.select(np.sort(part)) for part in parts)
    return train, test
