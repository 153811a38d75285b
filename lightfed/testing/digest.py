"""Fits a case and computes a digest of all that must not depend on ranks or restarts."""

import csv
import hashlib
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from lightfed.federation import Federation
from lightfed.runs.run_logger import RunLogger
from lightfed.state.client_state import by_client
from lightfed.testing.case import ROUNDS, Case
from lightfed.trainer import FederatedTrainer

# Columns of tables that depend on the machine and on the number of ranks.
OF_THE_MACHINE = ("seconds", "wire_bytes")


def quiet() -> None:
    """Silence tips and warnings of libraries."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def fit(
    case: Case,
    folder: Path,
    *,
    rounds: int = ROUNDS,
    ckpt_path: str | None = None,
    ranks: int = 1,
    **flags: Any,
) -> tuple[FederatedTrainer, Federation]:
    """Run a case.

    Args:
        case: The case.
        folder: The folder for its run folder.
        rounds: The number of rounds.
        ckpt_path: The checkpoint to resume from, if any.
        ranks: The number of ranks.
        **flags: Arguments of the FederatedTrainer.

    Returns:
        The trainer and the root module after the run.
    """
    quiet()
    federation = case.federation_of()
    defaults = {"accelerator": "cpu", "enable_progress_bar": False, "enable_page": False}
    settings: dict[str, Any] = defaults | case.trainer | flags
    logger = RunLogger(str(folder), "run")
    trainer = FederatedTrainer(max_epochs=rounds, devices=ranks, logger=logger, **settings)
    trainer.fit(federation, datamodule=case.data(), ckpt_path=ckpt_path)
    return trainer, federation


def digest(trainer: FederatedTrainer, federation: Federation) -> dict[str, str]:
    """Return the digests of all that a run has computed, by part; every rank calls it.

    The parts are the server's state, the clients' rows after the last round and what they keep,
    the metrics, costs and tables.
    """
    fleet = federation.fleet
    assert trainer.run_logger is not None
    folder = trainer.run_logger.folder

    rows_of_rank = []
    for state in fleet.groups:
        for client in list(state.store.slots):
            row = state.store.row(client)
            rows_of_rank.append((client, _hash(row.floats, row.integers)))
    rows = fleet.ranks.gather(rows_of_rank)

    kept_on_rank = []
    for client, kept_state in by_client(fleet.states() or {}).items():
        kept_on_rank.append((client, _hash(*kept_state.values())))
    kept = fleet.ranks.gather(kept_on_rank)

    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "server": _hash(*federation.state_dict().values()),
        "kept": repr(sorted(kept)),
        "rows": hashlib.sha256(repr(sorted(rows)).encode()).hexdigest(),
        "metrics": repr(sorted(metrics.items())),
        "ledger": _hash(torch.from_numpy(fleet.ledger.totals)),
        "metrics.csv": _table(folder / "metrics.csv"),
        "clients.csv": _table(folder / "clients.csv"),
    }


def _table(path: Path) -> str:
    """Return the digest of a table, without what depends on the machine."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in OF_THE_MACHINE:
            row.pop(column, None)
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _hash(*tensors: torch.Tensor) -> str:
    """Return the digest of the values of tensors."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()
