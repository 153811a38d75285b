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

OF_THE_MACHINE = ("seconds", "wire_bytes")


def quiet() -> None:
    """Silence tips and progress."""
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
    """Run a case in a folder."""
    quiet()
    federation = case.federation_of()
    settings: dict[str, Any] = (
        {"accelerator": "cpu", "enable_progress_bar": False, "enable_page": False}
        | case.trainer
        | flags
    )
    logger = RunLogger(str(folder), "run")
    trainer = FederatedTrainer(max_epochs=rounds, devices=ranks, logger=logger, **settings)
    trainer.fit(federation, datamodule=case.data(), ckpt_path=ckpt_path)
    return trainer, federation


def digest(trainer: FederatedTrainer, federation: Federation) -> dict[str, str]:
    """Digest of server state, rows after the last round, metrics and tables, on every rank."""
    fleet = federation.fleet
    rows = fleet.ranks.gather(
        [
            (client, _hash(state.store.row(client).floats, state.store.row(client).integers))
            for state in fleet.groups
            for client in list(state.store.slots)
        ]
    )
    states = by_client(fleet.states() or {})
    kept = [(client, _hash(*state.values())) for client, state in states.items()]
    assert trainer.run_logger is not None
    folder = trainer.run_logger.folder
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return {
        "server": _hash(*federation.state_dict().values()),
        "kept": repr(sorted(fleet.ranks.gather(kept))),
        "rows": hashlib.sha256(repr(sorted(rows)).encode()).hexdigest(),
        "metrics": repr(sorted(metrics.items())),
        "ledger": _hash(torch.from_numpy(fleet.ledger.totals)),
        "metrics.csv": _table(folder / "metrics.csv"),
        "clients.csv": _table(folder / "clients.csv"),
    }


def _table(path: Path) -> str:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in rows]
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def _hash(*tensors: torch.Tensor) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()
