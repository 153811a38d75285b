"""The documentation's lines on the kernels run as they stand."""

import re
from pathlib import Path
from typing import Any

import lightfed_kernels
import torch
from lightfed_kernels import Layout, Segments, pack_mask


def test_the_lines_on_kernels_run() -> None:
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    def layout(width: int) -> Layout:
        return Layout.build([("body.weight", (width, 8)), ("head.weight", (10, width))])

    wide, half, quarter = layout(16), layout(8), layout(4)
    levels = [0, 1, 2]
    covered = [one.live() for one in (wide, half, quarter)]
    words = pack_mask(wide.live().expand(10, -1))
    names: dict[str, Any] = vars(lightfed_kernels) | {
        "wide": wide,
        "half": half,
        "quarter": quarter,
        "levels": levels,
        "samples": [3.0, 2.0, 1.0],
        "labels": [[0, 1], [2], None],
        "server_row": wide.new_row(),
        "client_rows": [1.0 * one for one in covered],
        "rows": wide.new_row(10) + 1.0,
        "lists": [[0, 1], [2]],
        "own": words[:2].clone(),
        "row": torch.arange(float(wide.size)),
        "words": words,
        "counts": [1, 1],
        "segments": Segments.build(wide),
        "gradient": torch.arange(float(wide.size)),
    }
    # The mask of one row, where the lines above take those of ten.
    for line in code.strip().splitlines():
        if line.startswith("prune_regrow"):
            names["words"] = words[0].clone()
        exec(line, names)
    assert wide.views(names["server_row"])["body.weight"].eq(1.0).all()
