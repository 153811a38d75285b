"""One of two ranks that share a GPU.

`python -m tests.promises.ranks.gpu_rank FOLDER` with LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT set; it leaves what it saw in a file.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from lightfed.testing.digest import digest, fit
from tests.promises.conformance.cases import CASES

NAMES = ("heterofl", "dispfl")  # rows that are all-reduced; swapped


def main() -> None:
    folder = Path(sys.argv[1])
    found = {}
    for name in NAMES:
        trainer, federation = fit(
            CASES[name], folder / name, accelerator="gpu", ranks=1, ranks_per_device=2
        )
        found[name] = {
            "backend": dist.get_backend(),
            "device": str(trainer.strategy.root_device),
            "finite": all(bool(v.isfinite().all()) for v in federation.state_dict().values()),
            "digest": digest(trainer, federation),
        }
    (folder / f"rank{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
