"""What a column of metrics.csv is: `<kind>/<metric>`, its spread, or its mean over a client group.

Metrics (`val/acc`) and client groups may have slashes in their names.
"""

import re

# what was tested: which model, on whose samples; the first that a run has is its main one
KINDS = ("global", "personal", "local", "trained", "aggregated", "finetuned")
# name on the page and explanation of the clients' kinds, except `personal`
OF_CLIENTS = {
    "local": ("local", "the global model on a client's own test samples"),
    "trained": ("as trained", "what a client holds, before aggregation"),
    "aggregated": ("after aggregation", "what a client holds, before its next session"),
    "finetuned": ("fine-tuned", "the global model after a session on a client's data"),
}


def natural_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts client10 after client9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def is_metric(column: str) -> bool:
    return "/" in column and kind_of(column) in KINDS


def kind_of(column: str) -> str:
    return column.partition("/")[0]


def base_name(column: str) -> str:
    """`personal/val/acc` -> `val/acc`; a column without a kind keeps its name."""
    return column.partition("/")[2] if is_metric(column) else column
