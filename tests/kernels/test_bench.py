import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightfed_kernels.bench import __main__ as command
from lightfed_kernels.bench import interpret, measure, plot, report
from lightfed_kernels.bench.case import (
    COMPILED,
    OFFICIAL,
    OURS,
    Case,
    Contender,
    flat,
    relative_error,
)
from lightfed_kernels.bench.cases import OPERATIONS, build_cases
from lightfed_kernels.bench.environment import Clock, Environment
from lightfed_kernels.bench.models import CNN, RATES, RESNET18, TINY
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import pack_mask

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")

CASES = [
    case
    for dtype in (torch.float32, torch.bfloat16)
    for case in build_cases(OPERATIONS, [TINY], [1, 6], [dtype], CPU)
]


@pytest.fixture(autouse=True)
def _no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is checked by one test, not by every run of the command."""
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")
    monkeypatch.setattr(interpret, "check_in_child", lambda operations, dtypes: 0)


def fake(run: Any, *, truth: Any = (1.0, 2.0), **changes: Any) -> Case:
    """A case whose own code is `run`, beside an official code that is right."""
    expected = torch.tensor(truth)
    case = Case(
        operation="pack_mask",
        model="resnet18",
        shape="1 client",
        clients=1,
        dtype=torch.float32,
        build=lambda seed: seed,
        reference=lambda given: expected,
        contenders={
            OURS: Contender(lambda given: run),
            OFFICIAL: Contender(lambda given: expected.clone),
        },
        floor_bytes=8,
        input_bytes=8,
    )
    return replace(case, **changes)


def row(**changes: Any) -> measure.Row:
    values: dict[str, Any] = {
        "operation": "pack_mask", "model": "resnet18", "shape": "1 client", "clients": 1,
        "dtype": "float32", "contender": OURS, "ms": 1.0, "ms_p20": 0.5, "ms_p80": 2.0,
        "host_ms": 1.0, "samples": 3, "floor_bytes": 10**6, "gb_per_s": 1.0, "copy_percent": 50.0,
        "read_percent": 60.0, "times_official": 20.0, "times_ours": 1.0, "launches": 1,
        "error": 0.0, "passed": True,
        "h200_floor_ms": 0.1,
    }  # fmt: skip
    return measure.Row(**(values | changes))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    status = command.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().out.splitlines()


# The codes that compete, and what they are held against.


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.title}".replace(" ", "-"))
def test_every_code_agrees_with_the_float64_reference(case: Case) -> None:
    given = case.build(3)
    truth = case.reference(given)
    assert {OURS, OFFICIAL} <= set(case.contenders)
    for name, contender in case.contenders.items():
        if name == COMPILED:
            continue
        error = case.error(contender.bind(given)(), truth)
        assert error <= case.allowed(name), name


def test_codes_that_overwrite_their_inputs_do_not_see_each_other() -> None:
    for case in CASES:
        given, same = case.build(0), case.build(0)
        for name in case.contenders:
            if name != COMPILED:
                case.contenders[name].bind(given)()
        for field, value in vars(same).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(given, field), value), f"{case.title}: {field}"


def test_every_operation_of_the_command_has_a_case() -> None:
    assert {case.operation for case in CASES} == set(OPERATIONS)


def test_models_have_the_sizes_of_the_papers() -> None:
    assert RESNET18.layout.numel == 11_173_962
    assert len(RESNET18.layout.entries) == 62
    sizes = [RESNET18.level(rate).numel for rate in RATES]
    assert sizes == [11_173_962, 2_797_610, 701_466, 176_402, 44_622]
    assert CNN.layout.numel == 98_922


@pytest.mark.parametrize(
    ("operation", "clients", "shape", "gigabytes"),
    [
        ("masked_mean", 1, "1 receiver of 11", 0.553),
        ("slice_merge", 10, "10 clients", 0.164),
        ("weighted_mean", 10, "10 clients", 0.492),
        ("grouped_mean", 10, "10 clients", 0.894),
        ("aspg_step", 1, "1 client", 0.268),
        ("sgd_step", 1, "1 client", 0.225),
    ],
)
def test_floors_count_every_byte_once(
    operation: str, clients: int, shape: str, gigabytes: float
) -> None:
    cases = build_cases([operation], [RESNET18], [clients], [torch.float32], CPU)
    found = {case.shape: case.floor_bytes for case in cases}
    assert found[shape] == pytest.approx(gigabytes * 1e9, rel=2e-3)


def test_a_sender_that_many_receivers_hear_is_read_once_in_the_floor() -> None:
    cases = build_cases(["masked_mean"], [RESNET18], [100], [torch.float32], CPU)
    shares, everybody = list(cases)
    row_bytes = RESNET18.layout.size * (4 + 1 / 8)
    assert shares.shape == "13 receivers of 100"
    assert everybody.floor_bytes == 200 * row_bytes
    assert everybody.read_bytes == (100 * 11 + 100) * row_bytes


def test_named_tensors_compare_with_the_row_that_they_make() -> None:
    layout = Layout.build([("a", (3, 2)), ("b", ()), ("c", (64,))])
    line = layout.new_row().normal_().mul_(layout.live())
    assert torch.equal(flat(layout.views(line)), line)
    assert torch.equal(flat([layout.views(line), line]), torch.cat([line, line]))


def test_errors_are_relative_and_of_masks_the_share_of_wrong_bits() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, torch.nan]), truth))
    mask = torch.zeros(32, dtype=torch.bool)
    other = mask.clone()
    other[:8] = True
    assert relative_error(pack_mask(other), mask) == 0.25
    assert relative_error(other.float(), mask) == 0.25
    assert relative_error(torch.tensor(7), torch.tensor(7)) == 0


# Measuring.


def measured(case: Case) -> dict[str, measure.Row]:
    rows = measure.measure(case, Clock(CPU), copy_gb_per_s=10, repetitions=4)
    return {found.contender: found for found in rows}


def test_a_row_says_how_the_time_relates_to_floor_and_official_code() -> None:
    rows = measured(fake(lambda: torch.tensor([1.0, 2.0]), floor_bytes=4_300_000))
    ours, official = rows[OURS], rows[OFFICIAL]
    assert ours.passed
    assert ours.error == 0
    assert ours.ms_p20 <= ours.ms <= ours.ms_p80
    assert ours.samples == 4
    assert official.times_official == ours.times_ours == 1
    assert official.times_ours == ours.times_official
    assert ours.times_official == pytest.approx(official.ms / ours.ms)
    assert ours.gb_per_s == pytest.approx(4.3 / ours.ms)
    assert ours.copy_percent == pytest.approx(10 * ours.gb_per_s)
    assert ours.h200_floor_ms == pytest.approx(1e-3)


def test_calls_rotate_over_input_sets() -> None:
    seen: list[int] = []

    def bind(given: int) -> Any:
        return lambda: seen.append(given) or torch.tensor([1.0, 2.0])

    case = fake(None)
    measured(replace(case, contenders={**case.contenders, OURS: Contender(bind)}))
    assert set(seen) == set(range(measure.SETS))
    seen.clear()
    big = replace(case, contenders={**case.contenders, OURS: Contender(bind)}, input_bytes=2**40)
    measured(big)
    assert set(seen) == {0}


def test_timed_calls_take_the_input_sets_in_turn() -> None:
    taken: list[object] = []

    def clock(call: object, *, other: object = None) -> tuple[float, float]:
        taken.append(call)
        assert other is not call
        return 1.0, 1.0

    calls = [object(), object(), object()]
    measure._take_turns({OURS: calls}, clock, 4)  # type: ignore[arg-type, dict-item]
    assert taken[1:] == [*calls, calls[0]]


def test_an_output_that_is_not_written_is_an_error() -> None:
    rows = measured(fake(lambda: torch.empty(2)))
    assert math.isnan(rows[OURS].error)
    assert not rows[OURS].passed
    assert rows[OFFICIAL].passed


def test_operators_are_counted_without_views_and_allocations() -> None:
    a = torch.ones(4)
    count = measure.count_launches("flat", lambda: a.view(2, 2).add(torch.empty(2)).mul_(2), CPU)
    assert count == 2
    assert measure.count_launches(COMPILED, lambda: a, CPU) is None


# The requirements.


def test_gates_pass_fail_or_were_not_measured() -> None:
    rows = [
        row(times_official=20.0),
        row(operation="prune_regrow", times_official=2.4),
        row(
            operation="masked_mean", shape="1 receiver of 11", times_official=9.0, dtype="bfloat16"
        ),
    ]
    lines, met = report.gates(rows, "cpu", OPERATIONS)
    assert not met
    words = {line.split("=")[1].split(None, 1)[1]: line.split()[0] for line in lines}
    assert words["pack_mask, 1 client: times the official code"] == "PASS"
    assert words["prune_regrow, 1 client: times the official code"] == "FAIL"
    assert words["masked_mean, 1 receiver of 11: times the official code"] == "not"


def test_gates_are_met_by_good_numbers_that_are_right() -> None:
    for device in ("cpu", "cuda"):
        named = {(g.operation, g.shape, g.contender) for g in report.GATES if g.device == device}
        rows = [
            row(operation=operation, shape=shape, contender=contender, times_official=60.0,
                copy_percent=90.0, read_percent=90.0)
            for operation, shape, contender in named
        ]  # fmt: skip
        assert report.gates(rows, device, OPERATIONS)[1]
        assert not report.gates([replace(rows[0], passed=False), *rows[1:]], device, OPERATIONS)[1]


def test_every_gate_names_a_case_of_the_benchmark() -> None:
    cases = build_cases(OPERATIONS, [RESNET18], [1, 10, 100], [torch.float32], CPU)
    found = {(case.operation, case.shape): case.contenders for case in cases}
    for gate in report.GATES:
        assert gate.contender in found[gate.operation, gate.shape]


# The command.

QUICK = ("--quick", "--device", "cpu", "--case", "pack_mask", "weighted_mean", "--reps", 1)


@without_gpu
def test_without_a_gpu_the_first_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = run(capsys, *QUICK, "--dtype", "float32", "--clients", 2)
    assert status == 0
    assert lines[0].startswith("No CUDA device: ")
    assert "bound and not a measurement" in lines[0]
    assert f"torch {torch.__version__}" in lines[1]
    assert "GB/s in this run" in lines[1]
    table = [line.split() for line in lines[3:]]
    assert [(words[0], words[1]) for words in table[:2]] == [("pack_mask", "cnn-w8")] * 2
    assert "FAIL" not in "".join(lines)


def test_files_hold_the_environment_and_every_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("b.json", "b.csv", "b.png")]
    status, _ = run(
        capsys, *QUICK, "--clients", 2, "--json", files[0], "--csv", files[1], "--plot", files[2]
    )
    assert status == 0
    content = json.loads(files[0].read_text())
    assert set(content) == {"env", "rows"}
    assert content["env"]["threads"] == 1
    assert content["env"]["copy_gb_per_s"] > 0
    rows = content["rows"]
    assert [r["contender"] for r in rows if r["operation"] == "pack_mask"] == [OURS, OFFICIAL]
    assert {r["dtype"] for r in rows if r["operation"] == "weighted_mean"} == {
        "float32", "bfloat16",
    }  # fmt: skip
    assert all(r["passed"] and r["ms"] > 0 and r["launches"] > 0 for r in rows)
    with files[1].open(newline="") as file:
        lines_ = list(csv.DictReader(file))
    assert len(lines_) == len(rows)
    assert all(line["torch"] == content["env"]["torch"] for line in lines_)
    assert [float(line["ms"]) for line in lines_] == [r["ms"] for r in rows]
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_wrong_result_prints_fail_and_is_the_exit_status(
    value: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    wrong = fake(lambda: torch.tensor([1.0, value]))
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [wrong])
    status, lines = run(capsys, "--quick", "--device", "cpu", "--json", tmp_path / "b.json")
    assert status == 1
    assert sum(line.endswith("FAIL") for line in lines) == 1
    content = json.loads((tmp_path / "b.json").read_text(), parse_constant=pytest.fail)
    assert [r["error"] for r in content["rows"]] == [None, 0.0]


@pytest.mark.parametrize("status", [1, -11])
def test_a_check_that_fails_or_crashes_is_the_exit_status(
    status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpret, "why_not", lambda: None)
    monkeypatch.setattr(interpret, "check_in_child", lambda operations, dtypes: status)
    monkeypatch.setattr(command, "build_cases", lambda *a: [fake(lambda: torch.tensor([1.0, 2]))])
    assert run(capsys, "--quick", "--device", "cpu")[0] == 1


def test_a_missed_requirement_is_the_exit_status_of_gate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fake(lambda: torch.tensor([1.0, 2.0]))
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [slow])
    assert run(capsys, "--device", "cpu")[0] == 0
    status, lines = run(capsys, "--gate", "--device", "cpu")
    assert status == 1
    assert any(line.startswith("  FAIL") and "pack_mask" in line for line in lines)


def test_a_case_that_does_not_fit_into_memory_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    huge = fake(None, input_bytes=2**60)
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [huge])
    status, lines = run(
        capsys, "--quick", "--device", "cpu", "--csv", tmp_path / "b.csv", "--plot",
        tmp_path / "b.png",
    )  # fmt: skip
    assert status == 0
    assert f"pack_mask resnet18 1 client float32: left out, needs {2**30} GiB of memory" in lines
    assert lines[-1] == "nothing was measured"


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_compiled_and_their_launches_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "auto")
    status, _ = run(capsys, "--quick", "--device", "cuda", "--json", tmp_path / "b.json")
    assert status == 0
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["env"]["clock"] == "CUDA events"
    ours = [r for r in content["rows"] if r["contender"] == OURS]
    assert {r["operation"] for r in ours} == set(OPERATIONS)
    assert all(r["launches"] is None or r["launches"] > 0 for r in ours)


@without_gpu
def test_device_cuda_without_cuda_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["--device", "cuda"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "--device cuda: there is no CUDA device; leave it out, or use cpu\n"


def test_interpreted_kernels_are_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    assert command.main(["--quick", "--device", "cpu"]) == 2
    assert "the torch paths are timed; unset it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--case", "nonsense"], "invalid choice: 'nonsense'"),
        (["--clients", "0"], "0 is not at least 1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--json", "/no/such/folder/b.json"], "/no/such/folder is no folder"),
        (["--quick", "--model", "cnn"], "--model has no effect with --quick; leave one of"),
        (["--gate", "--dtype", "float32"], "--dtype has no effect with --gate; leave one of"),
        (["--check", "--json", "b.json"], "--json has no effect with --check; leave one of"),
        (["--plot", "b.pdf"], "b.pdf does not end in .png"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# The interpreter.


def test_a_wrong_kernel_fails_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = fake(lambda: torch.tensor([1.0, 2.5]))
    monkeypatch.setattr(interpret, "build_cases", lambda *arguments: [wrong])
    assert interpret.check(["pack_mask"], [torch.float32]) == 1
    assert capsys.readouterr().out.startswith("  FAIL pack_mask")


def test_where_kernels_cannot_be_interpreted_a_line_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.5.2"}
    monkeypatch.setattr(interpret, "version", versions.__getitem__)
    assert command.main(["--check"]) == 2
    assert "Triton before 3.7 interprets no run-time loop" in capsys.readouterr().err
    versions["numpy"] = "2.3.5"
    assert interpret.why_not() is None


@pytest.mark.skipif(interpret.why_not() is not None, reason="kernels cannot be interpreted here")
def test_check_runs_the_kernels_in_a_process_that_interprets_them() -> None:
    arguments = ["--check", "--case", "pack_mask", "weighted_mean", "--dtype", "float32"]
    hidden = ("TRITON_INTERPRET", "LIGHTFED_KERNELS")
    done = subprocess.run(
        [sys.executable, "-m", "lightfed_kernels.bench", *arguments],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("  ok ") and "interpreted kernel" in line for line in lines)


def test_a_check_without_its_environment_ends_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert interpret.main("pack_mask", "float32") == 2
    assert "LIGHTFED_KERNELS; or use --check" in capsys.readouterr().err


def test_a_plot_has_every_model_and_code(tmp_path: Path) -> None:
    environment = Environment(
        device="cpu", processor="a processor", clock="a clock", copy_gb_per_s=10.0, cache_mb=32.0,
        threads=1, python="3", torch="2", triton="3", numpy="2", cuda="", driver="", backend="auto",
        date="2026-01-01",
    )  # fmt: skip
    rows = [
        row(model=model, operation=operation, contender=code, times_official=times)
        for model in ("resnet18", "cnn")
        for operation in ("pack_mask", "masked_mean")
        for code, times in ((OURS, 9.0), (OFFICIAL, 1.0), (COMPILED, 3.0), ("mv", 2.0))
    ]
    plot.save(tmp_path / "b.png", environment, rows)
    assert (tmp_path / "b.png").stat().st_size > 10_000


def test_the_batch_script_is_well_formed() -> None:
    script = ROOT / "slurm" / "kernels.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert '"$@"' in text
