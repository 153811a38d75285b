"""Byte-deterministic tiny files in the layouts of the official data sets.

Every class has a fixed template and its samples are that plus noise, so that training on them
learns. The functions return what they wrote: of both splits the images (N, C, H, W) uint8 and the
labels (N,) int64; of a text its lines.
"""

import csv
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import wavfile

from lightfed.datasets.speech import RATE, Tones
from lightfed.datasets.text import Docstrings
from lightfed.utils.rng import derive_seed, numpy_generator

Written = dict[str, tuple[np.ndarray, np.ndarray]]


def samples(
    count: int, *, classes: int, shape: tuple[int, ...], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, *shape) uint8 and labels (count,), every class as often as any other (+-1)."""
    templates = np.random.default_rng(classes).integers(40, 216, (classes, *shape))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    noise = rng.integers(-30, 31, (count, *shape))
    return (templates[labels] + noise).astype(np.uint8), labels


def cifar10(root: Path, *, per_batch: int = 40) -> Written:
    """ROOT/cifar-10-batches-py: five training batches, a test batch, batches.meta."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    x, y = samples(5 * per_batch, classes=10, shape=(3, 32, 32), seed=1)
    test = samples(per_batch, classes=10, shape=(3, 32, 32), seed=2)
    for number in range(1, 6):
        part = slice((number - 1) * per_batch, number * per_batch)
        _cifar_file(folder / f"data_batch_{number}", x[part], {"labels": y[part].tolist()})
    _cifar_file(folder / "test_batch", test[0], {"labels": test[1].tolist()})
    names = {"label_names": [f"thing {i}" for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))
    return {"train": (x, y), "test": test}


def cifar100(root: Path, *, train: int = 200, test: int = 100) -> Written:
    """ROOT/cifar-100-python: train, test, meta, with fine and coarse labels."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    written = {}
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        x, y = samples(count, classes=100, shape=(3, 32, 32), seed=seed)
        labels = {"fine_labels": y.tolist(), "coarse_labels": (y // 5).tolist()}
        _cifar_file(folder / split, x, labels)
        written[split] = (x, y)
    names = {"fine_label_names": [f"fine {i}" for i in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names))
    return written


def mnist(root: Path, *, name: str = "MNIST", train: int = 120, test: int = 60) -> Written:
    """ROOT/<name>/raw: the four uncompressed idx files."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    written = {}
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        x, y = samples(count, classes=10, shape=(1, 28, 28), seed=seed)
        prefix = "train" if split == "train" else "t10k"
        images = struct.pack(">IIII", 2051, count, 28, 28) + x.tobytes()
        labels = struct.pack(">II", 2049, count) + y.astype(np.uint8).tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
        written[split] = (x, y)
    return written


def wikitext2(root: Path, *, lines: int = 900, hub: bool = False) -> dict[str, list[str]]:
    """ROOT/wikitext-2: three token files, or with `hub` a parquet file of each split.

    Of eleven lines the first is a heading and the last is blank. The first word of a line is
    anything, each further one nearly always follows from the word before, so that training learns.
    One word of the test text never occurs in training.
    """
    folder = root / "wikitext-2"
    folder.mkdir(parents=True)
    written = {}
    for seed, split in enumerate(("train", "valid", "test")):
        count = lines if split == "train" else lines // 6
        rng = np.random.default_rng(seed)
        written[split] = [_line(rng, number) for number in range(count)]
    written["test"][-1] = " w1 <unk> unheard-of . \n"
    for split, content in written.items():
        if hub:
            parquet(folder / f"{split}-00000-of-00001.parquet", {"text": content})
        else:
            (folder / f"wiki.{split}.tokens").write_text("".join(content), "utf-8", newline="\n")
    return written


SPOKEN = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "bed", "zero"]


def speech_commands(root: Path, *, version: str = "v0.01", speakers: int = 10) -> Tones:
    """ROOT/SpeechCommands/speech_commands_VERSION: two clips of each of `SPOKEN` by each speaker.

    Two speakers in ten are tested, one is in the validation list. One clip in five is short.
    """
    tones = Tones(words=len(SPOKEN), clips=2 * len(SPOKEN) * speakers, speakers=speakers)
    write_tones(root, tones, words=SPOKEN, version=version)
    return tones


def write_tones(root: Path, tones: Tones, *, words: Sequence[str], version: str = "v0.01") -> None:
    """ROOT/SpeechCommands/speech_commands_VERSION: the clips, with a folder for each of `words`.

    The test speakers are in testing_list.txt, the first speaker in validation_list.txt, and two
    recordings of noise in _background_noise_.
    """
    folder = root / "SpeechCommands" / f"speech_commands_{version}"
    noises = folder / "_background_noise_"
    for new in (noises, *(folder / word for word in words)):
        new.mkdir(parents=True)
    paths = []
    for clip, speaker in enumerate(tones.speaker.tolist()):
        name = f"{derive_seed(0, 'tones/name', client=speaker) & 0xFFFFFFFF:08x}"
        utterance = clip // (tones.words * tones.speakers)
        paths.append(f"{words[clip % tones.words]}/{name}_nohash_{utterance}.wav")
    for path, recording in zip(paths, tones.recordings(np.arange(tones.clips)), strict=True):
        write_recording(folder / path, recording)
    _write_list(folder / "testing_list.txt", paths, tones.speaker % 5 == 4)
    _write_list(folder / "validation_list.txt", paths, tones.speaker == 0)
    for colour, steps in (("white", 1), ("brown", 200)):
        noise = numpy_generator(0, f"tones/{colour}").normal(0, 2000, 15 * RATE)
        smooth = np.convolve(noise, np.ones(steps) / steps**0.5, mode="same")
        write_recording(noises / f"{colour}_noise.wav", smooth.astype(np.int16))


def _write_list(path: Path, clips: list[str], listed: np.ndarray) -> None:
    path.write_text("".join(f"{clips[i]}\n" for i in np.flatnonzero(listed)))


def write_recording(path: Path, samples: np.ndarray) -> None:
    """A wav file of (n,) int16 samples."""
    wavfile.write(path, RATE, samples)


NEWS = {
    "World": "minister treaty Border vote embassy",
    "Sports": "goal match Coach season stadium",
    "Business": "shares profit Merger oil market",
    "Sci/Tech": "software chip Probe browser network",
}


def ag_news(
    root: Path, *, train: int = 80, test: int = 24
) -> dict[str, tuple[list[str], np.ndarray]]:
    """ROOT/ag_news_csv: two csv files.

    Titles and descriptions are of the words of a class, and hold commas, quotes and ends of lines.
    Returned are the texts and the labels (N,) of both splits.
    """
    folder = root / "ag_news_csv"
    folder.mkdir(parents=True)
    written = {}
    for seed, (split, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(count) % len(NEWS))
        words = [list(NEWS.values())[label].split() for label in labels]
        titles = [" ".join(rng.choice(own, 3)) for own in words]
        bodies = [f'{", ".join(rng.choice(own, 9))} "{own[0]}"\\\nend' for own in words]
        texts = [f"{title} {body}" for title, body in zip(titles, bodies, strict=True)]
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            rows = zip((labels + 1).tolist(), titles, bodies, strict=True)
            csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
        written[split] = (texts, labels)
    return written


def documented(root: Path, *, each: int = 40) -> dict[str, list[Path]]:
    """ROOT/PACKAGE/a.py for each class of `Docstrings`, with this many documented functions.

    Returned is what `lightfed.datasets.text.source_folders` would find.
    """
    folders = {name: [root / name] for name in Docstrings.classes}
    for name, (folder,) in folders.items():
        folder.mkdir(parents=True)
        text = f"A function of {name} that does what its name says, at length. " * 2
        lines = [f'def f{i}():\n    """{text}Number {i}."""\n' for i in range(each)]
        (folder / "a.py").write_text("".join(lines))
    return folders


THINGS = "airplane automobile bird cat deer dog frog horse ship truck"


def cinic10(root: Path, *, per_class: int = 3) -> Written:
    """ROOT/{train,valid,test}/CLASS/*.png; the images returned are in the order of class, name."""
    from PIL import Image

    written = {}
    for seed, split in enumerate(("train", "valid", "test")):
        x, y = samples(10 * per_class, classes=10, shape=(3, 32, 32), seed=seed)
        order = np.argsort(y, kind="stable")
        for number, (image, label) in enumerate(zip(x[order], y[order], strict=True)):
            folder = root / split / THINGS.split()[label]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"cifar10-{split}-{number:05}.png"
            Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(path)
        written[split] = (x[order], y[order])
    return written


def _cifar_file(path: Path, x: np.ndarray, labels: dict[str, list[int]]) -> None:
    rows = x.reshape(len(x), -1)  # (N, 3072): all red values, all green ones, all blue ones
    names = [f"{path.name}_{i}.png" for i in range(len(x))]
    content = {"batch_label": path.name, **labels, "data": rows, "filenames": names}
    path.write_bytes(pickle.dumps(content, protocol=2))


def _line(rng: np.random.Generator, number: int) -> str:
    if number % 11 == 10:
        return " \n"
    words = [int(rng.integers(40))]
    while len(words) < 16:
        follows = (words[-1] * 7 + 3) % 40
        words.append(follows if rng.random() < 0.9 else int(rng.integers(40)))
    text = " ".join("<unk>" if word == 0 else f"w{word}" for word in words)
    return f" = {text} = \n" if number % 11 == 0 else f" {text} . \n"


def parquet(path: Path, columns: Mapping[str, list[Any]]) -> None:
    """A table in the format of the hub."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow.parquet import write_table  # type: ignore[import-untyped]

    write_table(pyarrow.table(columns), path)
