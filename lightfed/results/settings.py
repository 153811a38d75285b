"""The settings in a run's config.yaml by their dotted keys."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from lightfed.results.csvrows import damaged

# settings that define an experiment, as opposed to where and how it was run
OPTION = re.compile(
    r"trainer\.(max_epochs|gradient_clip_(val|algorithm)|precision)$"
    r"|model\.(?!(export|evaluate)\b|(seed|store|accumulate|exchange_buffer|eval_clients)$)"
    r"|data\.(?!dataset\.init_args\.(root|download)$|(eval_batch_size|channels_last)$)"
)

_FORMER = re.compile(r"^model\.cohorts\b")  # the key's name in version 0.1


def options(
    settings: Mapping[str, str], *, but: re.Pattern[str], unspoken: re.Pattern[str]
) -> dict[str, str]:
    """The settings that define an experiment, by short names; classes without their module.

    Args:
        settings: by their dotted keys.
        but: matches keys to leave out.
        unspoken: matches parts of a key to drop from its short name.
    """
    return {
        " ".join(unspoken.sub("", key).replace(".", " ").split()): (
            value.rsplit(".", 1)[-1] if key.endswith("class_path") else value
        )
        for key, value in settings.items()
        if OPTION.match(key) and not but.match(key)
    }


def read_settings(config: str, path: Path) -> dict[str, str]:
    """`{"model.clients.0.level": "a", ...}`: every value as the text in the file.

    Raises:
        UserError: `config`, the content of `path`, is not YAML.
    """
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # keeps scalars as text
    try:
        content = yaml.load(config, Loader=loader)
    except yaml.YAMLError as error:
        raise damaged(path, " ".join(str(error).split())) from error
    return {_FORMER.sub("model.clients", key): text for key, text in _flat(content) if text}


def _flat(value: object, *path: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and texts; the key of a list item is its position."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for step, inner in items:
            yield from _flat(inner, *path, str(step))
    elif path:
        yield ".".join(path), str(value)
