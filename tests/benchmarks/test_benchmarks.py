"""The benchmarks run, and the sides that they compare do equal work. No test looks at a time."""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks are scripts: they import each other from their own folder."""
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    # Where Lightning's ranks met in an earlier test of this process; its children meet elsewhere.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(threads)
    for name in [path.stem for path in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)


def trained_by_lightfed(workload: Any, rounds: int) -> list[list[torch.Tensor]]:
    from federated import Pace, Run, build

    turns = iter((rounds, None))
    models: list[list[torch.Tensor]] = []

    def between() -> int | None:
        left = next(turns)
        if left is None:
            models.extend([t.clone() for t in model] for model in Run(federation).models())
        return left

    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = build(workload, folder, Pace(between))
        trainer.fit(federation, datamodule=data)
    return models


def trained_by_hand(workload: Any, way: Any, rounds: int) -> list[list[torch.Tensor]]:
    from bare import bare

    side = bare(workload, way)
    for t in range(rounds):
        side.round(workload.draws(t), t)
    return side.models()


# DisPFL's second round grows weights whose gradients are all zero, in an order that is nobody's.
@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("W5", 2),
        *(pytest.param(f"W{n}", 2 - n // 4, marks=pytest.mark.matrix) for n in (1, 2, 3, 4)),
    ],
)
def test_all_sides_train_the_same_models(name: str, rounds: int) -> None:
    from workloads import WORKLOADS

    workload = WORKLOADS[name].tiny()
    ours = trained_by_lightfed(workload, rounds)
    for way in ("loop", "tuned", "batched"):
        theirs = trained_by_hand(workload, way, rounds)
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4, msg=lambda m, w=way: w + m)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "rounds"), [("W6", 2), ("W7", 1)])
def test_bare_loops_train_the_same_large_models(name: str, rounds: int) -> None:
    from workloads import LARGE

    workload = LARGE[name].tiny()
    ours = trained_by_lightfed(workload, rounds)
    for way in ("loop", "tuned"):
        theirs = trained_by_hand(workload, way, rounds)
        # Batch norm over few pixels enlarges rounding, which differs between processors.
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=5e-3, msg=lambda m, w=way: w + m)


@pytest.mark.matrix
def test_all_sides_search_masks_alike() -> None:
    from workers import loss
    from workloads import WORKLOADS

    workload = WORKLOADS["W4"].tiny()
    ours = trained_by_lightfed(workload, 2)
    for way in ("loop", "batched"):
        theirs = trained_by_hand(workload, way, 2)
        assert loss(workload, theirs) == pytest.approx(loss(workload, ours), rel=1e-3)
        # Few gradients of the second convolution are zero, and nearly the same weights are grown.
        second = zip([model[2] for model in theirs], [model[2] for model in ours], strict=True)
        apart = [((one != 0) != (other != 0)).float().mean().item() for one, other in second]
        assert max(apart) < 0.05


def test_a_side_that_learns_less_is_seen() -> None:
    from rounds import learned_alike

    equal: dict[Any, float] = {"loop": 1.0, "tuned": 1.01, "batched": 1.0, "lightfed": 1.0}
    assert learned_alike(2.0, equal)
    assert not learned_alike(2.0, equal | {"loop": 1.1})
    assert not learned_alike(1.0, equal)
    assert not learned_alike(2.0, dict.fromkeys(equal, 0.01) | {"loop": 0.02})


def test_a_ratio_is_taken_within_a_pass() -> None:
    from figures import Figure

    figure = Figure(baseline=[1.0, 10.0, 2.0], measured=[2.0, 10.0, 1.0], goal=0.9)
    assert figure.ratios == [2.0, 1.0, 0.5]
    assert (figure.median, figure.met) == (1.0, False)
    assert Figure(figure.baseline, figure.measured, goal=1.0).met


@pytest.mark.matrix
def test_rounds_take_turns_in_processes(capsys: pytest.CaptureFixture[str]) -> None:
    from rounds import compare
    from workloads import WORKLOADS

    compare(WORKLOADS["W1"].tiny(), passes=1)
    output = capsys.readouterr().out
    assert "losses: equal" in output
    assert "lightfed / batched" in output


@pytest.mark.matrix
def test_jobs_of_several_ranks_are_timed() -> None:
    options = ["--workloads", "W5", "--passes", "1", "--rounds", "1"]
    command = [sys.executable, str(FOLDER / "ranks.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CPU, busier") == 1


@pytest.mark.matrix
def test_packs_of_three_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    from packs import compare

    compare("Conv 1/16, 8x8", [3], reps=1, clients=3)
    assert "MFLOPs a batch" in capsys.readouterr().out


@pytest.mark.matrix
def test_many_clients_are_registered(capfd: pytest.CaptureFixture[str]) -> None:
    import million

    assert million.main(["--clients", "1500", "--rounds", "1", "--stores", "none", "device"]) == 0
    assert capfd.readouterr().out.count(" CPU)  at the start: peak") == 2


@pytest.mark.matrix
def test_checkpoints_are_written_in_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    import checkpoints

    few = ["--clients", "2", "--rounds", "1", "--steps", "1", "--width", "32"]
    checkpoints.main([*few, "--masked"])
    waits, beside = capsys.readouterr().out.splitlines()[-2:]
    assert waits.split(";")[1] == beside.split(";")[1]  # the same files


def test_a_pack_takes_fewer_operators_and_waits_for_no_value(tmp_path: Path) -> None:
    import operators
    from workloads import WORKLOADS

    tiny = WORKLOADS["W5"].tiny()
    alone = operators.count(tiny, way="off", device="cpu")
    packed = operators.count(tiny, way="packed", device="cpu", trace=tmp_path / "trace.json.gz")
    assert 0 < packed.operators < alone.operators
    assert packed.reads == 0
    assert (tmp_path / "trace.json.gz").stat().st_size > 0


def test_packs_have_room_where_their_operators_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import packed_operators

    assert packed_operators.main(["--tiny", "--workloads", "W6"]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "a step of a client" in line
    ]
    assert float(line.split()[-7]) > 1


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="under torch 2.12.1 this benchmark was measured on CPUs with AVX-512 alone",
)
def test_weights_in_the_order_of_the_images_are_not_copied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import formats

    assert formats.main(["--tiny", "--passes", "1", "--workloads", "W7"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines() if "operators" in line]
    operators = {words[0]: int(words[-2]) for words in printed}
    assert operators["first"] <= operators["both"] < operators["images"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "way", "precision"),
    [("W8", "sequential", "32"), ("W7", "packs32", "32"), ("W6", "packs32", "bf16")],
)
def test_models_are_timed(name: str, way: str, precision: str) -> None:
    import models

    found = models.by_lightfed(models.LARGE[name].tiny(), way, "cpu", 2, precision)
    assert len(found.seconds) == 2
    assert found.memory > 0
    assert found.losses[1] < found.losses[0]
    assert found.note == ""


@pytest.mark.matrix
def test_a_side_that_fails_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import models

    table = models.Table("cpu", 1, tmp_path)
    workload = models.LARGE["W8"].tiny()
    table.side(workload, "good", models.by_lightfed, "sequential")
    assert table.good
    table.side(workload, "none", models.by_hand, "loop")
    assert not table.good
    assert "failed: " in (tmp_path / "models.csv").read_text()
    assert models.main(["--tiny", "--passes", "1", "--workloads", "W6"]) == 0
    assert "sequential, bf16" in capsys.readouterr().out


@pytest.mark.matrix
def test_collectives_of_one_rank_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import nccl

    assert nccl.main(["--out", str(tmp_path)]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if " gloo " in line]
    assert len(printed) == len(nccl.CASES)
    assert not any(" 0 tensors" in line for line in printed)
    assert (tmp_path / "nccl.json").stat().st_size > 0


@pytest.mark.matrix
def test_a_curve_is_kept(tmp_path: Path) -> None:
    import curve

    assert curve.main(["--tiny", "--rounds", "2", "--out", str(tmp_path)]) == 0
    header, *rows = (tmp_path / "curve.csv").read_text().splitlines()
    assert header.startswith("round,global/accuracy")
    assert len(rows) == 2


def test_the_calls_of_a_clock_are_timed() -> None:
    import virtual_time

    for devices, policy in virtual_time.GIVEN.values():
        assert virtual_time.measure(devices, policy, 10, 2) > 0


@pytest.mark.parametrize("name", ["cohort", "curve", "models", "nccl", "operators", "published"])
def test_a_folder_for_results_is_made_before_anything_is_measured(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module(name)
    folder = tmp_path / "not" / "there"
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(folder), "--device", "abacus"])
    assert folder.is_dir()

    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path / "file")])
    assert "file: File exists" in capsys.readouterr().err


def test_packs_of_a_given_size_have_memory_for_it() -> None:
    import models
    import operators
    import workers

    for ways in (models.WAYS, operators.WAYS, workers.WAYS):
        for way, settings in ways.items():
            assert isinstance(settings.get("side_by_side"), int) <= ("pack_memory" in settings), way


def test_a_limit_leaves_fewer_rounds() -> None:
    from rounds import rounds_in

    assert rounds_in(None, 20, 1e6) == 20
    assert rounds_in(12.0, 20, 3.0) == 4
    assert rounds_in(12.0, 20, 0.1) == 20
    assert rounds_in(12.0, 20, 500.0) == 1


def test_every_case_goes_through_nccl_before_one_goes_through_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import nccl

    runs: list[tuple[str, str]] = []

    def ran(_: Any, case: str, backend: str, *__: Any) -> dict[str, str]:
        runs.append((case, backend))
        return {nccl.SUMS: "1", "server": "bits"}

    monkeypatch.setattr(nccl, "apart", ran)
    assert nccl.main(["--device", "cuda", "--cases", "fedavg,heterofl"]) == 0
    assert runs == [
        ("fedavg", "none"), ("fedavg", "nccl"), ("heterofl", "none"), ("heterofl", "nccl"),
        ("fedavg", "gloo"), ("heterofl", "gloo"),
    ]  # fmt: skip


def test_the_rows_of_two_checkouts_name_scenarios_and_their_arguments() -> None:
    import inspect

    from beside import ROWS
    from scenarios import SCENARIOS

    for row in ROWS.values():
        assert {side for pair in row.over for side in pair} <= {*row.sides}
        for scenario in row.sides.values():
            kind, *arguments = scenario.split(":")
            inspect.signature(SCENARIOS[kind]).bind(None, *arguments)


@pytest.mark.matrix
def test_a_checkout_is_measured_beside_itself(capsys: pytest.CaptureFixture[str]) -> None:
    from beside import HERE, main

    assert main([HERE, "--rows", "lora", "--passes", "1"]) == 0
    assert main([HERE, "--profile", "lora"]) == 0
    printed = capsys.readouterr().out
    assert "now / before" in printed
    assert "lightfed/packs/session.py" in printed
