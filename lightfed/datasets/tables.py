"""Tables of samples: what Hugging Face `datasets` loads, from its hub, its cache or a path."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightfed.data.dataset import KEY, Split
from lightfed.utils.errors import UserError, reason

log = logging.getLogger(__name__)

# So many dropped classes are named.
_MOST_NAMED = 5

# Ends of the names of files that `datasets` reads.
_FILE_ENDS = (".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv")

Table = Any  # datasets.Dataset: the package takes two seconds to import


def open_table(path: str, split: str, *, key: str, name: str | None = None) -> Table:
    """Return a split of a data set, memory-mapped.

    Args:
        path: The file, the folder, or the name in the hub; see `Hub`.
        split: The split, as `datasets` reads it. A file has only the split `train`.
        key: The name of the argument that gives the split, for an error.
        name: The configuration, for a data set of the hub with several.

    Raises:
        UserError: There is no such data set, it has no such split, or it cannot be read.
    """
    local = Path(path).expanduser()
    is_there = local.exists()
    looks_local = local.suffix in _FILE_ENDS or path.startswith(("/", ".", "~"))
    if looks_local and not is_there:
        raise UserError(
            key=f"{KEY}.path",
            found=f"{path} does not exist",
            fix="give a file, a folder, or a name of the hub",
        )

    try:
        return _open(local if is_there else None, path, split, name)
    except Exception as error:  # a format can raise anything
        # The error of `datasets` says that something failed, and its cause says what.
        is_wrapped = type(error).__name__ == "DatasetGenerationError"
        cause = error.__cause__ if is_wrapped and error.__cause__ is not None else error
        why = reason(cause)

        is_about_split = re.search("split|instruction", why) is not None
        if is_about_split and isinstance(error, (KeyError, ValueError)):
            raise UserError(
                key=f"{KEY}.{key}",
                found=f"{path} has no {split!r} ({why})",
                fix="name a split that exists, or a part of one, such as `train[:80%]`; "
                "or hold out test: 0.2",
            ) from error
        raise UserError(
            key=f"{KEY}.path",
            found=f"{path} cannot be loaded ({why})",
            fix="check the name; without a network, give a path, or a name that is in the cache",
        ) from error


def open_splits(
    path: str, train: str, test: float | str, by: Callable[[Table], str], name: str | None = None
) -> dict[Split, Table]:
    """Return the training and the test split of a data set, both with samples.

    Args:
        path: The file, the folder, or the name in the hub; see `Hub`.
        train: The training split, as `datasets` reads it.
        test: The test split. Or a share, which is held out of the training split, always the same
            samples.
        by: Returns the column of a table whose values are to have the same share, up to rounding,
            if each value occurs twice.
        name: The configuration, for a data set of the hub with several.

    Raises:
        UserError: A split does not exist or has no samples, or the test split has samples of the
            training split.
    """
    table = open_table(path, train, key="train", name=name)

    splits: dict[Split, Table]
    if isinstance(test, str):
        if _overlap(train, test):
            raise UserError(
                key=f"{KEY}.test",
                found=f"{test}, which has samples of the training split, {train}",
                fix="name another one, or parts such as train[:80%] and train[80%:]",
            )
        splits = {"train": table, "test": open_table(path, test, key="test", name=name)}
    else:
        if not 0 < test < 1:
            fix = "name a split, or give a share such as 0.2"
            raise UserError(f"{KEY}.test", found=f"{test}", fix=fix)
        if len(table) < 2:
            found = f"{len(table)} samples"
            raise UserError(f"{KEY}.train", found, fix="give at least two")
        train_table, test_table = _held_out(table, test, by(table))
        splits = {"train": train_table, "test": test_table}

    for split, split_table in splits.items():
        if len(split_table) == 0:
            fix = "name a split that has some"
            raise UserError(f"{KEY}.{split}", found="no samples", fix=fix)
    return splits


def _overlap(train: str, test: str) -> bool:
    """Return whether two splits surely share samples: they are equal, or one is all of the other.

    Whether `train[:80%]` and `train[70%:]` share samples is not known here.
    """
    train_name, _, train_part = train.partition("[")
    test_name, _, test_part = test.partition("[")
    if train_name != test_name:
        return False
    one_is_whole = train_part == "" or test_part == ""
    return train_part == test_part or one_is_whole


def column_of(table: Table, name: str | None, key: str) -> str:
    """Return the name of a column if a table has it.

    Args:
        table: The table.
        name: The name; None if none is given.
        key: The name of the argument that gives it, for the error.

    Raises:
        UserError: The table has no such column.
    """
    names = list(table.column_names)
    if name not in names:
        raise UserError(
            key=f"{KEY}.{key}",
            found=f"{name or 'none given'}, the columns are {', '.join(names)}",
            fix="name one of them",
        )
    return str(name)


def texts_of(table: Table, column: str, split: Split) -> list[str]:
    """Return the texts in a column.

    Args:
        table: The table.
        column: The name of the column.
        split: The split of the table, for the error.

    Raises:
        UserError: Names the first sample without a text.
    """
    texts: list[str] = table[column][:]
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            found = f"{split}: sample {position} has {text!r}"
            raise UserError(f"{KEY}.text", found, fix="give a text")
    return texts


def coded(
    tables: Mapping[Split, Table], column: str, key: str, *, trained: bool
) -> tuple[tuple[str, ...], dict[Split, Tensor]]:
    """Return the distinct values of a column as text, and for each sample the number of its value.

    Values of the training split come first, and those of a split in ascending order. A column of
    named classes keeps its names in their order. In another split they can have other numbers, so
    the names count.

    Args:
        tables: The table of each split.
        column: The name of the column.
        key: The name of the argument that gives the column, for the error.
        trained: Whether only values of the training split have numbers.

    Returns:
        The values as text, and the numbers for each split as an int64 tensor of shape (N,).

    Raises:
        UserError: Names the first sample whose value has no number.
    """
    values_of_split = {split: _values(table, column) for split, table in tables.items()}

    known_values: list[Any] = _class_names(tables["train"], column)
    if not known_values:
        counted = [values_of_split["train"]] if trained else list(values_of_split.values())
        for values in counted:
            new_values = {value for value in values if _is_label(value)} - set(known_values)
            known_values += sorted(new_values)
    number_of = {value: number for number, value in enumerate(known_values)}

    fix = "give whole numbers or words"
    if trained:
        fix += ", and train on samples of every class; or set unknown_labels: drop"

    numbers_of_split = {}
    for split, values in values_of_split.items():
        numbers = []
        for position, value in enumerate(values):
            # A list or a dict cannot be looked up.
            if isinstance(value, list | dict) or value not in number_of:
                raise UserError(
                    key=f"{KEY}.{key}",
                    found=f"{split}: sample {position} has {value!r}, which no training sample has",
                    fix=fix,
                )
            numbers.append(number_of[value])
        numbers_of_split[split] = torch.tensor(numbers)
    return tuple(map(str, known_values)), numbers_of_split


def without_unknown_labels(tables: Mapping[Split, Table], column: str) -> Table:
    """Return the table of the test split without samples whose class no training sample has.

    What is no class, such as a missing one, stays, so that it is refused. One line says how many
    samples were dropped, and why.

    Args:
        tables: The table of each split.
        column: The column of the classes.
    """
    table = tables["test"]
    known = set(_class_names(tables["train"], column))
    if not known:
        known = {value for value in _values(tables["train"], column) if _is_label(value)}

    kept = []
    dropped: list[Any] = []
    for position, value in enumerate(_values(table, column)):
        if _is_label(value) and value not in known:
            dropped.append(value)
        else:
            kept.append(position)
    if not dropped:
        return table

    names = ", ".join(repr(value) for value in sorted(set(dropped), key=str)[:_MOST_NAMED])
    log.warning(
        "%s: dropped %d of %d test samples; no training sample has their classes: %s",
        f"{KEY}.unknown_labels",
        len(dropped),
        len(table),
        names,
    )
    return table.select(kept)


def _is_label(value: Any) -> bool:
    """Return whether a value is a word or a whole number; a csv file can have these as floats."""
    if isinstance(value, float):
        return value % 1 == 0
    return isinstance(value, (str, int))


def _class_names(table: Table, column: str) -> list[str]:
    """Return the names of classes that a column has in its type; empty if it has none."""
    return list(getattr(table.features[column], "names", None) or ())


def _values(table: Table, column: str) -> list[Any]:
    """Return the values of a column; a class is its name."""
    values: list[Any] = table[column][:]
    names = _class_names(table, column)
    if not names:
        return values
    return [names[value] if value in range(len(names)) else value for value in values]


def _open(local: Path | None, path: str, split: str, name: str | None) -> Table:
    """Load a split of a data set.

    Args:
        local: The file or folder; None for a data set of the hub.
        path: The name of the data set in the hub.
        split: The split.
        name: The configuration, for a data set with several.
    """
    import datasets

    # What fails is raised, too, so that the libraries need not print it.
    datasets.disable_progress_bars()
    for package in ("datasets", "huggingface_hub"):
        logging.getLogger(package).setLevel(logging.CRITICAL)

    if local is None:
        return datasets.load_dataset(path, name, split=split)

    if local.is_file():
        options = {"sep": "\t"} if local.suffix == ".tsv" else {}
        files = {"train": str(local)}
        kind = {".jsonl": "json", ".tsv": "csv"}.get(local.suffix, local.suffix[1:])
        return datasets.load_dataset(kind, data_files=files, split=split, **options)

    # Folders that `save_to_disk` has written: of a data set with splits, or of one split.
    if (local / "dataset_dict.json").is_file():
        return _split_of(dict(datasets.load_from_disk(local)), split)
    if (local / "state.json").is_file():
        return _split_of({"train": datasets.load_from_disk(local)}, split)

    # A folder of LEAF has a folder for each split, with files that begin with their users.
    first_file = next(local.glob("[!.]*/*.json"), None)
    if first_file is not None and b'"users"' in first_file.read_bytes()[:64]:
        folders = {folder.name: folder for folder in local.iterdir() if folder.is_dir()}
        return datasets.Dataset.from_dict(_leaf_columns(_split_of(folders, split)))

    return datasets.load_dataset(str(local), name, split=split)


def _split_of(splits: dict[str, Any], split: str) -> Any:
    if split not in splits:
        raise KeyError(f"unknown split, there is {', '.join(splits) or 'none'}")
    return splits[split]


def _leaf_columns(folder: Path) -> dict[str, list[Any]]:
    """Return the columns x, y and user of a folder of LEAF (Caldas et al. 2018)."""
    columns: dict[str, list[Any]] = {"x": [], "y": [], "user": []}
    for file in sorted(folder.glob("*.json")):
        for user, samples in json.loads(file.read_bytes())["user_data"].items():
            columns["x"] += samples["x"]
            columns["y"] += samples["y"]
            columns["user"] += [user] * len(samples["y"])
    return columns


def _held_out(table: Table, share: float, by: str) -> tuple[Table, Table]:
    """Return a table without a share of its samples, and a table of these.

    Args:
        table: The table.
        share: The share, between 0 and 1.
        by: The column whose values are to have the same share.
    """
    from sklearn.model_selection import train_test_split

    positions = np.arange(len(table))
    try:
        parts = train_test_split(positions, test_size=share, random_state=0, stratify=table[by][:])
    except (TypeError, ValueError):
        # The values are no labels, there are too many of them, or one occurs only once.
        parts = train_test_split(positions, test_size=share, random_state=0)
    train_positions, test_positions = parts
    return table.select(np.sort(train_positions)), table.select(np.sort(test_positions))
