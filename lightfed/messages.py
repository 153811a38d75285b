"""Parser messages of many lines, told in one: key, what was found, what to do."""

import re

_KEYS = re.compile(r"['\"]([\w.]+)['\"]")


def one_line(message: str) -> str:
    """Collapse white space."""
    return re.sub(r"\s+", " ", message).strip()
