"""One rank of the kit: runs every case, in one process a rank, and prints the digests.

`python -m tests.conformance.worker FOLDER RANKS` with LOCAL_RANK, MASTER_ADDR and MASTER_PORT set.
"""

import json
import os
import sys
from pathlib import Path

from tests.conformance.cases import CASES, ROUNDS
from tests.conformance.run import digest, fit


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    results = {}
    for name, case in CASES.items():
        results[name] = {"straight": digest(*fit(case, folder / name, ranks=ranks))}
        stopped = folder / f"{name}-stopped"
        fit(case, stopped, rounds=ROUNDS - 1, ranks=ranks)
        resumed = fit(case, stopped, ckpt_path="last", ranks=ranks)
        results[name]["resumed"] = digest(*resumed)
    if os.environ["LOCAL_RANK"] == "0":
        (folder / "digests.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
