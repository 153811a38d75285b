"""Ranks of a Trainer: how many on which device, and where they meet."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from lightfed.engine.strategy import FederatedStrategy
from lightfed.testing.ranks import kept_port
from lightfed.trainer import FederatedTrainer
from lightfed.utils.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def trainer(**flags: Any) -> FederatedTrainer:
    return FederatedTrainer(
        accelerator="gpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        **flags,
    )  # fmt: skip


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("given", ["federated", FederatedStrategy(timeout=5)])
def test_ranks_share_a_gpu_over_gloo(given: Any) -> None:
    ranks = trainer(devices=2, num_nodes=3, ranks_per_device=2, strategy=given).strategy
    assert isinstance(ranks, FederatedStrategy)
    assert [device.index for device in ranks.parallel_devices or []] == [0, 0, 1, 1]
    assert ranks.num_processes == ranks.launcher.num_processes == 4  # type: ignore[union-attr]
    assert ranks.world_size == 12
    assert ranks._get_process_group_backend() == "gloo"


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_of_its_own_gpu_talks_over_nccl() -> None:
    ranks = trainer(devices=[1]).strategy
    assert isinstance(ranks, FederatedStrategy)
    assert ranks.parallel_devices == [torch.device("cuda", 1)]
    assert ranks._get_process_group_backend() == "nccl"


@pytest.mark.parametrize(("others", "backend"), [("GPU-1", "gloo"), ("GPU-2", "nccl")])
def test_ranks_that_a_launcher_put_on_one_gpu_talk_over_gloo(
    others: str, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process sees one GPU, its first; only the name of it tells that it is the same."""
    store, started = dist.HashStore(), dict[str, Any]()
    store.set("lightfed/card/1", others)

    def start(backend: str, **options: Any) -> None:
        started.update(options, backend=backend)

    card = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: store)
    monkeypatch.setattr(dist, "init_process_group", start)
    with kept_port() as keeper:
        ranks = strategy_at("localhost", monkeypatch, port=keeper.getsockname()[1])
        ranks.parallel_devices = [torch.device("cuda", 0)]
        ranks.set_world_ranks()
        monkeypatch.setattr(FederatedStrategy, "listener", socket.socket())
        monkeypatch.setattr(FederatedStrategy, "world_size", 2)
        ranks.meet()
    assert started["backend"] == ranks._get_process_group_backend() == backend
    assert started["device_id"] == (torch.device("cuda", 0) if backend == "nccl" else None)
    said = [record.getMessage() for record in caplog.records]
    assert said == [line for line in said if "ranks 0, 1 share a GPU" in line]
    assert len(said) == (backend == "gloo")


@pytest.mark.usefixtures("two_gpus")
def test_a_task_of_slurm_has_the_gpu_of_its_place_on_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {"NTASKS": 8, "NTASKS_PER_NODE": 4, "NNODES": 2, "PROCID": 6, "LOCALID": 2, "NODEID": 1}
    for name, value in tasks.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    ranks = trainer(devices=2, num_nodes=2, ranks_per_device=2).strategy
    assert isinstance(ranks, FederatedStrategy)
    assert isinstance(ranks.cluster_environment, SLURMEnvironment)
    ranks.cluster_environment.validate_settings(num_devices=ranks.num_processes, num_nodes=2)
    assert (ranks.global_rank, ranks.root_device.index) == (6, 1)


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_a_timeout_of_nothing_is_refused(minutes: float) -> None:
    with pytest.raises(UserError, match=r"^trainer\.strategy\.init_args\.timeout: "):
        FederatedStrategy(timeout=minutes)


def test_ranks_that_do_not_meet_are_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise dist.DistStoreError("Timed out: 1/2 clients joined.\nframe #0")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    said = r"^MASTER_ADDR: .* at localhost:\d+ \(.*1/2 clients joined\.\);"
    with kept_port() as keeper, pytest.raises(UserError, match=said):
        strategy_at("localhost", monkeypatch, port=keeper.getsockname()[1]).setup_distributed()


def test_a_port_that_is_taken_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = strategy_at("127.0.0.1", monkeypatch, port=port)
        with pytest.raises(
            UserError, match=rf"^MASTER_ADDR: .* at 127\.0\.0\.1:{port} \("
        ) as error:
            ranks.setup_distributed()
    assert "in use" in str(error.value)


def strategy_at(
    address: str, monkeypatch: pytest.MonkeyPatch, *, port: int, ranks: int = 2
) -> FederatedStrategy:
    """The strategy of rank 0 on the CPU, before it has met the others."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", str(port))
    # A run of another test in this process has left its group.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    strategy = FederatedStrategy()
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * ranks
    return strategy


@pytest.mark.gpu
def test_two_ranks_train_on_one_gpu(tmp_path: Path) -> None:
    with kept_port() as keeper:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(keeper.getsockname()[1])}
        shared |= {"WORLD_SIZE": "2", "NODE_RANK": "0"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.promises.ranks.gpu_rank", str(tmp_path)],
                env=os.environ | shared | {"LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        errors = [process.communicate(timeout=250)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    both = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert both[0] == both[1]
    for seen in both[0].values():
        assert (seen["backend"], seen["device"], seen["finite"]) == ("gloo", "cuda:0", True)
