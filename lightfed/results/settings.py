"""The settings in a run's config.yaml by their dotted keys, and in which of them runs differ."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml  # type: ignore[import-untyped]

from lightfed.results.csvfile import damaged

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

# settings that define an experiment, as opposed to what is measured of it
OPTION = re.compile(
    r"trainer\.(max_epochs|gradient_clip_(val|algorithm)|precision)$"
    r"|model\.(?!evaluate\b|(seed|accumulate|eval_clients)$)"
    r"|data\.(?!(eval_batch_size|channels_last)$)"
)
# where and how a run was made, which its results do not tell
HOW = re.compile(
    r"ckpt_path$|trainer\.(default_root_dir|accelerator|devices|num_nodes|strategy|logger|profiler"
    r"|enable_\w+|checkpoint_\w+|num_threads|ranks_per_device|detect_anomaly)\b"
    r"|model\.(export|store|store_folder|exchange_buffer|capture)\b"
    r"|data\.(resident|dataset\.init_args\.(root|download))$"
)
SEED = re.compile(r"[^.]*seed", re.IGNORECASE)
PLACE = re.compile(r"(?:^|.*\.)(?:name|version|[^.]*(?:dir|path|folder)|output)$")
NAMELESS = ("data", "levels")  # options in labels whose values explain themselves
_NAMED = 5  # options that a note names
NOTHING_ELSE = re.compile(r"(?!)")
UNSPOKEN = re.compile(r"^(trainer|model|data)\.|\b(init_args|class_path)\b")


def options(
    settings: Mapping[str, str],
    *,
    but: re.Pattern[str] = NOTHING_ELSE,
    unspoken: re.Pattern[str] = UNSPOKEN,
) -> dict[str, str]:
    """The settings that define an experiment, by short names; classes without their module.

    `but` matches keys to leave out, `unspoken` parts of a key to drop from its short name.
    """
    return {
        " ".join(unspoken.sub("", key).replace(".", " ").split()): (
            value.rsplit(".", 1)[-1] if key.endswith("class_path") else value
        )
        for key, value in settings.items()
        if OPTION.match(key) and not (HOW.match(key) or but.match(key))
    }


def of_experiment(settings: Mapping[str, str], names: set[str]) -> frozenset[tuple[str, str]]:
    """What runs share that differ only in their seed; `names` are those of the run."""
    return frozenset(
        (key, text)
        for key, text in settings.items()
        if not (
            HOW.match(key)
            or any(map(SEED.match, key.split(".")))
            or (PLACE.match(key) and names & {*re.split(r"[/\\'\"\s]+", text)})
        )
    )


def read_settings(config: str, path: Path) -> dict[str, str]:
    """`{"model.clients.0.level": "a", ...}`: every value as the text in the file.

    A UserError if `config`, the content of `path`, is not YAML.
    """
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # keeps scalars as text
    try:
        content = yaml.load(config, Loader=loader)
    except yaml.YAMLError as error:
        raise damaged(path, " ".join(str(error).split())) from error
    return {key: text for key, text in _flat(content) if text}


def _flat(value: object, *path: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and texts; the key of a list item is its position."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for step, inner in items:
            yield from _flat(inner, *path, str(step))
    elif path:
        yield ".".join(path), str(value)


def gathered(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by key, in the order of each key's first item."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def usual(options: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The most frequent value of each option, or `unset`; none in a tie, so that all show."""
    names = dict.fromkeys(name for one in options for name in one)
    found = {}
    for name in names:
        (value, times), *others = Counter(one.get(name, "unset") for one in options).most_common(2)
        found[name] = "" if others and others[0][1] == times else value
    return found


def difference(options: Mapping[str, str], usual: Mapping[str, str]) -> str:
    """The options with unusual values, such as `norm gn, width 0.5`."""
    own = {name: options.get(name, "unset") for name in usual}
    return ", ".join(f"{name} {own[name]}" for name in usual if own[name] != usual[name])


def variants(options: Sequence[Mapping[str, str]], alike: Sequence[Hashable]) -> list[str]:
    """How each differs from most of those with the same key in `alike`."""
    paired = list(zip(options, alike, strict=True))
    members = gathered(paired, lambda pair: pair[1])
    most = {key: usual([own for own, _ in found]) for key, found in members.items()}
    return [difference(own, most[key]) for own, key in paired]


def told_apart(options: Sequence[Mapping[str, str]]) -> list[str]:
    """The method, and the fewest options that tell experiments of one method apart: `FML, lr 0.1`.

    Earlier options are preferred. Equal experiments get equal texts, empty if all are equal. The
    values of `method` and NAMELESS stand without their names.
    """
    methods = gathered(range(len(options)), lambda i: options[i].get("method", ""))
    texts = [""] * len(options)
    for method, places in methods.items():
        own = [options[i] for i in places]
        chosen = _distinguishing(own)
        for i, one in zip(places, own, strict=True):
            said = [
                one[name] if name in NAMELESS else f"{name} {one[name]}"
                for name in chosen
                if one.get(name, "null") != "null"
            ]
            texts[i] = ", ".join([method] * (len(methods) > 1 and bool(method)) + said)
    return texts


def unsaid(options: Sequence[Mapping[str, str]], labels: Sequence[str]) -> str:
    """The options in which experiments of one method differ besides those in their labels."""
    every = dict.fromkeys(name for one in options for name in one)
    names = [name for name in every if name not in NAMELESS and not name.endswith("digest")]
    differ = [name for name in names if len({one.get(name) for one in options}) > 1]
    silent = [name for name in differ if not any(f"{name} " in label for label in labels)]
    short = list(dict.fromkeys(" ".join(re.sub(r"\b\d+\b", "", name).split()) for name in silent))
    more = f" and {len(short) - _NAMED} more" if len(short) > _NAMED else ""
    return ", ".join(short[:_NAMED]) + more


def _distinguishing(options: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest names whose values tell the options apart."""

    def distinct(chosen: Sequence[str]) -> int:
        return len({tuple(one.get(name) for name in chosen) for one in options})

    chosen: list[str] = []
    for name in dict.fromkeys(name for one in options for name in one):
        if distinct([*chosen, name]) > distinct(chosen):
            chosen.append(name)
    for name in chosen[::-1]:
        rest = [other for other in chosen if other != name]
        if distinct(rest) == distinct(chosen):
            chosen = rest
    return chosen
