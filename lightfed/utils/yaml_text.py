"""Configurations as text."""

import re
from typing import Any

import yaml  # type: ignore[import-untyped]


class _Dumper(yaml.SafeDumper):
    """Quotes words that the parser of the command line would read as numbers, such as 1e3.

    In YAML 1.1 they are words, so that PyYAML would write them without quotes.
    """


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def config_text(config: dict[str, Any]) -> str:
    """Return a configuration as a file has it; keys stay in their order."""
    text: str = yaml.dump(config, Dumper=_Dumper, sort_keys=False)
    return text
