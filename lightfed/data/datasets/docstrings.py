"""Real text that needs no files: the docstrings of installed packages."""

import ast
import json
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from itertools import chain
from pathlib import Path

import numpy as np
from typing_extensions import override

from lightfed.data.datasets.cache import cached
from lightfed.data.datasets.dataset import KEY, Split
from lightfed.data.datasets.text import Characters
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

_PACKAGES = ("torch", "numpy", "pandas")
_SHORTEST = 80  # characters
_PARTS = {"torch": ("nn", "optim", "distributed", "utils")}  # enough; the rest would take time
_SKIPPED = {"test", "tests", "testing", "idle_test", "_vendor", "site-packages", "dist-packages"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Docstrings(Characters):
    """Which package does a docstring belong to: the standard library, torch, numpy or pandas?

    Different docstrings of at least 80 characters, equally many per class; a fifth is the test
    split. The samples depend only on the versions of the packages. Reading the sources takes ten
    seconds, once for all runs (`lightfed.data.datasets.cache`).
    """

    classes = ("stdlib", *_PACKAGES)

    def __init__(self, *, length: int = 1014, per_class: int = 1200) -> None:
        """Read the docstrings.

        Args:
            length: characters of a sample; longer texts are cut, shorter ones padded.
            per_class: texts of each class in both splits together; less if a package has fewer.
        """
        super().__init__(length=length)
        require(per_class >= 5, f"{KEY}.per_class", f"{per_class} texts", "give at least 5")
        self.per_class = per_class

    @override
    def fetch(self) -> None:
        self._found  # noqa: B018 - reading it scans the sources

    @override
    def _texts(self, split: Split) -> tuple[list[str], np.ndarray]:
        texts, labels = self._found
        count = min(self.per_class, *np.bincount(labels, minlength=self.num_classes).tolist())
        found = f"not all of {', '.join(self.classes)} are installed with documented *.py files"
        require(count >= 5, "data.dataset", found, "take AGNews, or install them from wheels")
        rng = numpy_generator(0, "docstrings/split")
        part = slice(count // 5) if split == "test" else slice(count // 5, count)
        chosen = [
            rng.permutation(np.flatnonzero(labels == c))[part] for c in range(len(self.classes))
        ]
        index = rng.permutation(np.concatenate(chosen))
        return [texts[i] for i in index], labels[index]

    @cached_property
    def _found(self) -> tuple[list[str], np.ndarray]:
        """All texts, and their classes, (N,) int64."""
        kept = cached("docstrings", _versions(), _scanned)
        texts, labels = json.loads(kept.numpy().tobytes())
        return texts, np.array(labels, dtype=np.int64)


def source_folders() -> dict[str, list[Path]]:
    """The source folders of each class."""
    folders = {"stdlib": [Path(sysconfig.get_path("stdlib"))]}
    for name in _PACKAGES:
        root = Path(str(files(name)))
        folders[name] = [root / part for part in _PARTS.get(name, ("",))]
    return folders


def _versions() -> dict[str, str]:
    """Everything that the texts depend on."""
    installed = {name: version(name) for name in _PACKAGES}
    return {"format": "2", "stdlib": platform.python_version()} | installed


def _scanned() -> list[np.ndarray]:
    """JSON in bytes: a list of the texts of all classes and a list of their classes."""
    texts: dict[str, int] = {}
    folders = source_folders()
    for label, name in enumerate(Docstrings.classes):
        for text in chain.from_iterable(map(docstrings, folders[name])):
            texts.setdefault(text, label)
    encoded = json.dumps([list(texts), list(texts.values())]).encode()
    return [np.frombuffer(encoded, dtype=np.uint8)]


def docstrings(folder: Path) -> Iterator[str]:
    """The docstrings of at least 80 characters in a folder, in the order of files and lines."""
    for path in sorted(folder.rglob("*.py")):
        if not _SKIPPED.isdisjoint(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about backslashes in strings
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # some sources are templates, or for another version of Python
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
            if text is not None and len(text) >= _SHORTEST:
                yield text
