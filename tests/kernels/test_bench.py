import csv
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import __main__ as command
from bench import measure, plot, report
from bench.case import COMPILED, OFFICIAL, OURS, Case, flat, relative_error
from bench.cases import OPERATIONS, build_cases
from bench.models import CNN, RATES, RESNET18, TINY
from lightfed_kernels import _rows
from lightfed_kernels._rows import interpreter_fault
from lightfed_kernels.layout import Layout
from lightfed_kernels.masks import pack_mask

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")

CASES = list(build_cases(OPERATIONS, [TINY], [1, 6], [torch.float32, torch.bfloat16], CPU))


@pytest.fixture(autouse=True)
def _torch_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "torch")


def fake(run: Any, **changes: Any) -> Case:
    """A case whose own code is `run`, next to an official code that is right."""
    truth = torch.tensor([1.0, 2.0])
    case = Case(
        operation="pack_mask",
        model="resnet18",
        shape="1 client",
        dtype=torch.float32,
        build=lambda seed: seed,
        reference=lambda given: truth,
        codes={OURS: lambda given: run, OFFICIAL: lambda given: truth.clone},
        floor_bytes=8,
        input_bytes=8,
    )
    return replace(case, **changes)


def row(**changes: Any) -> measure.Row:
    values: dict[str, Any] = {
        "operation": "pack_mask", "model": "resnet18", "shape": "1 client", "dtype": "float32",
        "contender": OURS, "ms": 1.0, "ms_p20": 0.5, "ms_p80": 2.0, "samples": 3,
        "floor_bytes": 10**6, "gb_per_s": 1.0, "copy_percent": 50.0, "read_percent": 60.0,
        "times_official": 20.0, "error": 0.0, "passed": True,
    }  # fmt: skip
    return measure.Row(**(values | changes))


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks how fast anything is, so that what is copied need not exceed the cache."""
    monkeypatch.setattr("bench.measure.SCRAP_BYTES", 2**16)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    status = command.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().out.splitlines()


# The codes that compete, and what they are held against.


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.title}".replace(" ", "-"))
def test_every_code_agrees_with_the_float64_reference(case: Case) -> None:
    truth = case.reference(case.build(3))
    assert {OURS, OFFICIAL} <= set(case.codes)
    for name, bind in case.codes.items():
        if name != COMPILED:
            error = relative_error(bind(case.build(3))(), truth)
            assert error <= case.allowed(name), name


def test_every_operation_of_the_command_has_a_case_and_none_has_it_twice() -> None:
    assert {case.operation for case in CASES} == set(OPERATIONS)
    assert len({case.title for case in CASES}) == len(CASES)


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
        ("grouped_mean", 10, "10 clients", 0.894),
        ("aspg_step", 1, "1 client", 0.268),
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


def test_named_and_listed_tensors_compare_with_the_row_that_they_make() -> None:
    layout = Layout.build([("a", (3, 2)), ("b", ()), ("c", (64,))])
    line = layout.new_row().normal_().mul_(layout.live())
    assert torch.equal(flat(layout.views(line)), line)
    assert torch.equal(flat(list(layout.views(line).values())), line)
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
    rows = measure.measure(case, CPU, copy_gb_per_s=10, calls=4)
    return {found.contender: found for found in rows}


def test_a_row_says_how_the_time_relates_to_floor_and_official_code() -> None:
    rows = measured(fake(lambda: torch.tensor([1.0, 2.0]), floor_bytes=10**6, read_bytes=3 * 10**6))
    ours, official = rows[OURS], rows[OFFICIAL]
    assert ours.passed
    assert ours.error == 0
    assert ours.ms_p20 <= ours.ms <= ours.ms_p80
    assert ours.samples == 4
    assert official.times_official == 1
    assert ours.times_official == pytest.approx(official.ms / ours.ms)
    assert ours.gb_per_s == pytest.approx(1 / ours.ms)
    assert ours.copy_percent == pytest.approx(10 * ours.gb_per_s)
    assert ours.read_percent == pytest.approx(3 * ours.copy_percent)


def test_every_code_has_inputs_of_its_own() -> None:
    def overwrites(given: torch.Tensor) -> Any:
        return lambda: given.add_(1)

    case = fake(None, build=lambda seed: torch.tensor([0.0, 1.0]), reference=lambda x: x + 1)
    rows = measured(replace(case, codes={OURS: overwrites, OFFICIAL: overwrites}))
    assert rows[OURS].error == rows[OFFICIAL].error == 0


def test_an_output_that_is_not_written_is_an_error() -> None:
    rows = measured(fake(lambda: torch.empty(2)))
    assert math.isnan(rows[OURS].error)
    assert not rows[OURS].passed
    assert rows[OFFICIAL].passed


# The requirements.


def test_gates_pass_fail_or_were_not_measured() -> None:
    other = row(operation="masked_mean", shape="1 receiver of 11", dtype="bfloat16")
    rows = [row(), row(operation="prune_regrow", times_official=2.4), other]
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
    found = {(case.operation, case.shape): case.codes for case in cases}
    for gate in report.GATES:
        assert gate.contender in found[gate.operation, gate.shape]


# The command.


def test_the_files_hold_the_environment_and_every_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, lines = run(
        capsys, "--quick", "--device", "cpu", "--case", "pack_mask", "grouped_mean",
        "--clients", 2, "--save", tmp_path,
    )  # fmt: skip
    assert status == 0
    assert "--check interprets the kernels" in lines[0]
    assert f"torch {torch.__version__}" in lines[1]
    assert "GB/s in this run" in lines[1]
    assert [line.split()[:2] for line in lines[3:5]] == [["pack_mask", "cnn-w8"]] * 2
    assert "FAIL" not in "".join(lines)
    [table] = tmp_path.glob("*.csv")
    [picture] = tmp_path.glob("*.png")
    assert table.stem == picture.stem
    assert picture.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) - 3
    assert {r["torch"] for r in rows} == {torch.__version__}
    assert {r["threads"] for r in rows} == {"1"}
    assert [r["contender"] for r in rows if r["operation"] == "pack_mask"] == [OURS, OFFICIAL]
    assert {r["dtype"] for r in rows if r["operation"] == "grouped_mean"} == {
        "float32", "bfloat16",
    }  # fmt: skip
    assert all(r["passed"] == "True" and float(r["ms"]) > 0 for r in rows)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_wrong_result_prints_fail_and_is_the_exit_status(
    value: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = fake(lambda: torch.tensor([1.0, value]))
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [wrong])
    status, lines = run(capsys, "--quick", "--device", "cpu")
    assert status == 1
    assert sum(line.endswith("FAIL") for line in lines) == 1


def test_a_missed_requirement_is_the_exit_status_of_gate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = fake(lambda: torch.tensor([1.0, 2.0]))
    other = replace(slow, operation="unpack_mask")
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [slow, other])
    assert run(capsys, "--device", "cpu")[0] == 0
    status, lines = run(capsys, "--gate", "--device", "cpu")
    assert status == 1
    assert not any(line.startswith("unpack_mask") for line in lines)
    assert any(line.startswith("  FAIL") and "pack_mask" in line for line in lines)


def test_a_case_that_does_not_fit_into_memory_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    huge = fake(None, input_bytes=2**60)
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [huge])
    status, lines = run(capsys, "--quick", "--device", "cpu", "--save", tmp_path)
    assert status == 0
    assert f"pack_mask resnet18 1 client float32: left out, needs {2**30} GiB of memory" in lines
    assert lines[-1] == "nothing was measured"
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_compiled_and_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "auto")
    assert run(capsys, "--quick", "--device", "cuda", "--save", tmp_path)[0] == 0
    [table] = tmp_path.glob("*.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["clock"] for r in rows} == {"CUDA events"}
    assert {r["operation"] for r in rows} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nonsense"], "--nonsense"),
        (["--case", "nonsense"], "nonsense"),
        (["--clients", "0"], "--clients"),
        (["--dtype", "int8"], "int8"),
        (["--save", "/no/such/folder"], "/no/such/folder"),
        (["--gate", "--quick"], "--quick"),
        (["--check", "--save", "."], "--save"),
        pytest.param(["--device", "cuda"], "--device", marks=without_gpu),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert named in output.err.splitlines()[-1]


def test_interpreted_kernels_are_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTFED_KERNELS", "triton")
    with pytest.raises(SystemExit) as stop:
        command.main(["--quick", "--device", "cpu"])
    assert stop.value.code == 2
    assert "LIGHTFED_KERNELS" in capsys.readouterr().err


# The interpreter.


@pytest.mark.skipif(bool(interpreter_fault()), reason=interpreter_fault())
def test_a_wrong_kernel_fails_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = fake(lambda: torch.tensor([1.0, 2.5]))
    monkeypatch.setattr(command, "INTERPRETED", {})
    monkeypatch.setattr(command, "build_cases", lambda *arguments: [wrong])
    status, lines = run(capsys, "--check")
    assert status == 1
    assert lines[0].startswith("  FAIL pack_mask")


@pytest.mark.matrix
@pytest.mark.skipif(bool(interpreter_fault()), reason=interpreter_fault())
def test_check_runs_the_kernels_in_the_interpreter() -> None:
    arguments = ["--check", "--case", "pack_mask", "grouped_mean", "--dtype", "float32"]
    hidden = ("TRITON_INTERPRET", "LIGHTFED_KERNELS")
    done = subprocess.run(
        [sys.executable, "kernels/bench", *arguments],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("  ok ") and "interpreted kernel" in line for line in lines)


def test_an_interpreter_that_cannot_run_the_kernels_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "interpreter_fault", lambda: "it does not; use another")
    with pytest.raises(SystemExit) as left:
        command.main(["--check"])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--check: it does not; use another")


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [("3.6.0", "2.5.2", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.4.6", True)],
)
def test_versions_that_interpret_kernels(
    monkeypatch: pytest.MonkeyPatch, triton: str, numpy: str, runs: bool
) -> None:
    monkeypatch.setattr(_rows, "version", lambda _: triton)
    monkeypatch.setattr(_rows.np, "__version__", numpy)
    fault = _rows.interpreter_fault.__wrapped__()
    assert (fault == "") == runs
    assert runs or (triton in fault and numpy in fault)


def test_a_plot_has_every_model_and_code(tmp_path: Path) -> None:
    environment = measure.Environment(
        device="cpu", processor="a processor", clock="a clock", copy_gb_per_s=10.0, threads=1,
        python="3", torch="2", triton="3", numpy="2", backend="auto", date="2026-01-01",
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


# On a card, imitated: minutes that end.


def test_rows_are_kept_code_by_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut off in its second code has the first in its table."""

    class CutOff(BaseException):
        pass

    def second_is_cut_off(run: Any, *_: Any) -> list[float]:
        if (tmp_path / "a-card.csv").exists():
            raise CutOff
        return [1.0]

    monkeypatch.setattr(measure, "time_calls", second_is_cut_off)
    monkeypatch.setattr(measure, "_cpu_name", lambda: "A card")
    with pytest.raises(CutOff):
        command.main(["--quick", "--device", "cpu", "--case", "pack_mask", "--save", str(tmp_path)])
    _, *lines = (tmp_path / "a-card.csv").read_text().splitlines()
    assert len(lines) == 1


def test_a_slow_code_is_not_called_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    seconds = iter([0.0, 3.3, 0.0, 0.2, 0.0, 0.2])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(seconds))
    cuda = torch.device("cuda")
    assert measure.time_calls(lambda: calls.append(1), cuda) == pytest.approx([3300.0])
    assert measure.time_calls(lambda: calls.append(1), cuda) == pytest.approx([200.0, 200.0])
    assert len(calls) == 3


def test_a_gate_on_a_card_measures_ours_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[tuple[str, str]] = []

    class Taken(measure.Measurement):
        def __init__(self, case: Case, *_: Any, **__: Any) -> None:
            self.case = case

        def take(self, name: str) -> None:
            taken.append((self.case.operation, name))

        def rows(self) -> list[measure.Row]:
            return []

    cases = [fake(None), replace(fake(None), operation="other")]
    options = command.parser().parse_args(["--gate"])
    monkeypatch.setattr(command, "Measurement", Taken)
    monkeypatch.setattr(command, "_chosen", lambda *_: cases)
    for seconds, expected in ((60.0, 4), (-1.0, 2)):
        taken.clear()
        monkeypatch.setattr(command, "GATE_SECONDS", seconds)
        command._measure(options, torch.device("cuda"), 1.0, lambda rows: None)
        assert [name for _, name in taken[:2]] == [OURS, OURS]
        assert len(taken) == expected
    assert "official left out, no time is left" in capsys.readouterr().out
