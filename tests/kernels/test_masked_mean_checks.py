"""masked_mean: empty inputs, what it refuses, torch's operator checks, golden aggregates."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from lightfed_kernels import Layout
from lightfed_kernels.masked_mean import (
    Neighbours,
    _masked_mean,
    masked_mean,
)
from lightfed_kernels.masks import pack_mask
from safetensors.torch import load_file
from torch import Tensor

from tests.kernels.mean_cases import (
    GOLDEN,
    LISTS,
    WEIGHTS,
    bits,
    values,
)


def test_empty_inputs_have_empty_or_zero_means(device: torch.device) -> None:
    none = Neighbours.build([], senders=2)
    x = values(2, 32).to(device)
    assert masked_mean(x, none).shape == (0, 32)
    alone = Neighbours.build([[], []], senders=0)
    assert torch.equal(masked_mean(x[:0], alone), torch.zeros(2, 32, device=device))
    out = torch.full((2, 32), float("nan"), device=device)
    assert torch.equal(masked_mean([], alone, out=out), torch.zeros(2, 32, device=device))
    assert masked_mean(x[:, :0], Neighbours.build([[0]], senders=2)).shape == (1, 0)
    nobody = Neighbours.build([[0, 1]], senders=2, weights=[[0.0, 0.0]])
    assert torch.equal(masked_mean(x, nobody), torch.zeros(1, 32, device=device))


def test_neighbour_lists_are_kept_as_they_were_given() -> None:
    built = Neighbours.build([[2, 0], [], [1]], senders=3, weights=[[1, 2], [], [0]])
    assert built.first.tolist() == [0, 2, 2, 2]
    assert built.index.tolist() == [2, 0]
    assert built.weights is not None
    assert built.weights.tolist() == [1.0, 2.0]
    assert (built.receivers, built.senders) == (3, 3)
    from_arrays = Neighbours.build(np.array([[2, 0]]), senders=3)  # type: ignore[arg-type]
    assert from_arrays.index.tolist() == [2, 0]
    assert from_arrays.weights is None


@pytest.mark.parametrize(
    ("lists", "weights", "message"),
    [
        ([[0], [1, 7]], None, "receiver 1: neighbour 7 out of range 0 .. 6"),
        ([[-1]], None, "receiver 0: neighbour -1 out of range 0 .. 6"),
        ([[0], [1]], [[1.0]], "weights: of 1 receivers; there are 2"),
        ([[0, 1]], [[1.0]], "receiver 0: 1 weights for 2 neighbours"),
        ([[3]], [[float("nan")]], "receiver 0: weight nan of neighbour 3; a weight is 0 or"),
        ([[3]], [[float("inf")]], "weight inf"),
        ([[3]], [[-1.0]], "weight -1.0 of neighbour 3"),
        ([[3]], [[1e-40]], "between 1e-30 and 1e[+]30"),
    ],
)
def test_neighbours_that_cannot_be_are_named(
    lists: list[list[int]], weights: list[list[float]] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Neighbours.build(lists, senders=7, weights=weights)


def test_arguments_that_do_not_fit_are_named() -> None:
    x, words = torch.zeros(2, 64), torch.zeros(2, 2, dtype=torch.int32)
    pair = Neighbours.build([[0, 1]], senders=2)

    def message(error: type[Exception], text: str, rows: Any = x, **arguments: Any) -> None:
        with pytest.raises(error, match=text):
            masked_mean(rows, arguments.pop("neighbours", pair), **arguments)

    message(ValueError, "rows: 3 rows; neighbours is built for 2", torch.zeros(3, 64))
    message(ValueError, "rows: 2 rows", neighbours=Neighbours.build([[0]], senders=1))
    message(ValueError, "rows: none", [], neighbours=Neighbours.build([[]], senders=0))
    message(ValueError, "multiple of 32", torch.zeros(2, 33))
    message(ValueError, r"rows\[1\]: rows of 32 elements; 64", [torch.zeros(64), torch.zeros(32)])
    message(TypeError, "float16", x.half())
    message(TypeError, "after float32", [x[0], x[1].double()])
    message(ValueError, "masks: 1 rows", masks=words[:1])
    message(ValueError, "masks: 1 words; 2 are needed", masks=words[:, :1])
    message(TypeError, "masks: int64", masks=words.long())
    message(ValueError, "receivers: 3 words; 2", receivers=torch.zeros(1, 3, dtype=torch.int32))
    message(ValueError, "receivers: 2 rows; one for each of 1 receivers", receivers=words)
    message(ValueError, "receivers: 2 rows; one for each", receivers=[*words])
    message(ValueError, "over: 'all' is not one of covered, neighbours", over="all")
    message(ValueError, "out: 2 rows; one for each of 1 receivers", out=torch.zeros(2, 64))
    message(ValueError, r"out: of shape \[64\]; a matrix is needed", out=torch.zeros(64))
    message(ValueError, "out: rows of 32 elements; 64 are needed", out=torch.zeros(1, 32))
    message(
        TypeError, "out: torch.float64 for rows of torch.float32", out=torch.zeros(1, 64).double()
    )
    message(ValueError, "out: elements of a row lie 2 apart", out=torch.zeros(1, 128)[:, ::2])
    twice = Neighbours.build([[0], [1]], senders=2)
    overlapping = torch.zeros(64).expand(2, 64)
    message(ValueError, "out: rows 0 and 1 share memory", neighbours=twice, out=overlapping)
    message(ValueError, "masks: on meta, but rows is on cpu", masks=words.to("meta"))


@pytest.mark.parametrize("begin", [4, 28, 64, 124])
def test_output_on_top_of_rows_is_refused(device: torch.device, begin: int) -> None:
    memory = torch.zeros(256, device=device)
    pair = Neighbours.build([[0, 0]], senders=1)
    with pytest.raises(ValueError, match="rows: shares memory with out"):
        masked_mean([memory[64:128]], pair, out=memory[begin : begin + 64][None])


def test_rows_that_cannot_be_replaced_are_refused(device: torch.device) -> None:
    pair = Neighbours.build([[0, 1], [1]], senders=2)
    rows = torch.zeros(2, 64, device=device)
    for width in (0, -32, 16, 48):
        with pytest.raises(ValueError, match=f"width: {width}; a multiple of 32 is needed"):
            masked_mean(rows, pair, width=width)
    with pytest.raises(ValueError, match="rows: rows 0 and 1 share memory; one is written twice"):
        masked_mean(rows[0].expand(2, 64), pair, width=32)
    with pytest.raises(ValueError, match="out: 2 rows; one for each of 1 receivers is needed"):
        masked_mean(rows, Neighbours.build([[0, 1]], senders=2), width=32)
    with pytest.raises(ValueError, match="masks: 1 words; 2 are needed for rows of 64"):
        masked_mean(rows, pair, masks=torch.zeros(2, 1, dtype=torch.int32), width=32)


def test_output_beside_rows_is_not(device: torch.device) -> None:
    memory = torch.ones(3, 128, device=device)
    pair = Neighbours.build([[0, 1, 2]] * 3, senders=3)
    masked_mean(memory[:, :64], pair, out=memory[:, 64:])
    masked_mean(memory[:, 64:], pair, out=memory[:, :64])
    assert torch.equal(memory, torch.ones(3, 128, device=device))


def test_rows_off_a_multiple_of_16_bytes_are_refused(device: torch.device) -> None:
    one = Neighbours.build([[0]], senders=1)
    memory = torch.zeros(128, device=device)
    with pytest.raises(ValueError, match="rows: row 0 starts 4 bytes past a multiple of 16"):
        masked_mean([memory[1:65]], one)
    with pytest.raises(ValueError, match="out: row 0 starts 8 bytes past"):
        masked_mean([torch.zeros(64, device=device)], one, out=memory[2:66][None])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_operator_passes_the_checks_of_torch(
    device: torch.device, weights: list[list[float]] | None
) -> None:
    x, words = values(5, 64).to(device), torch.full((5, 2), -2, dtype=torch.int32, device=device)
    n = Neighbours.build(LISTS, senders=5, weights=weights)
    out = torch.empty(4, 64, device=device)
    arguments = (out, [x[:3], x[3], x[4]], [words], [words[:4]], n.first, n.index, n.weights, False)
    torch.library.opcheck(_masked_mean, arguments)
    torch.library.opcheck(_masked_mean, (out, [x], [], [], n.first, n.index, n.weights, True))


def test_it_compiles_without_a_break_and_writes_into_a_block_of_columns() -> None:
    x, words = values(5, 64), pack_mask(bits(5, 64, density=0.5, seed=3))
    neighbours = Neighbours.build(LISTS, senders=5, weights=WEIGHTS)

    def step(x: Tensor, words: Tensor, wide: Tensor) -> Tensor:
        masked_mean(2 * x, neighbours, masks=words, receivers=words[:4], out=wide[:, 32:96])
        return wide + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(x, words, torch.zeros(4, 128))
    assert torch.equal(compiled(x, words, torch.zeros(4, 128)), expected)
    assert expected[:, 32:96].ne(1).any()


class Golden:
    """A file of the released code's tensors, as rows."""

    def __init__(self, name: str, prefix: str) -> None:
        self.tensors = load_file(GOLDEN / f"dispfl/{name}.safetensors")
        names = [key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix)]
        self.layout = Layout.build((n, tuple(self.tensors[prefix + n].shape)) for n in names)

    def row(self, prefix: str) -> Tensor:
        row = self.layout.new_row()
        for entry in self.layout:
            self.layout.view(row, entry).copy_(self.tensors[f"{prefix}/{entry.name}"])
        return row

    def rows(self, prefix: str, count: int, suffix: str = "") -> Tensor:
        return torch.stack([self.row(f"{prefix}{k}{suffix}") for k in range(count)])


def test_dispfl_aggregates_as_the_released_code(device: torch.device) -> None:
    golden = Golden("aggregate", "w/0/")
    meta = json.loads((GOLDEN / "dispfl/meta.json").read_text())["aggregate"]
    w = golden.rows("w/", meta["K"]).to(device)
    masks = pack_mask(golden.rows("shared_mask/", meta["K"]) > 0).to(device)
    own = pack_mask(golden.rows("local_mask/", meta["K"]) > 0).to(device)
    neighbours = Neighbours.build([c["members"] for c in meta["cases"]], senders=meta["K"])
    receivers = own[[c["cur"] for c in meta["cases"]]]
    consensus = masked_mean(w, neighbours, masks=masks)
    local = masked_mean(w, neighbours, masks=masks, receivers=receivers)
    for case in range(len(meta["cases"])):
        for name, got in (("consensus", consensus), ("local", local)):
            expected = golden.row(f"case{case}/{name}")
            torch.testing.assert_close(got[case].cpu(), expected, rtol=0, atol=1e-6)


def test_my2_starts_its_rounds_as_the_released_code(device: torch.device) -> None:
    """start = mean of the neighbours' and the client's own weights, times the new mask: exactly."""
    golden = Golden("loop_my2", "r0/0/start/")
    loop = json.loads((GOLDEN / "dispfl/loops.json").read_text())["loop_my2"]
    for r in range(1, loop["rounds"]):
        chosen = {c["client"]: c["neighbours"] for c in loop["neighbour_choice"] if c["round"] == r}
        lists = [sorted([*chosen[k], k]) for k in range(loop["N"])]
        got = masked_mean(
            golden.rows(f"r{r - 1}/", loop["N"], "/end").to(device),
            Neighbours.build(lists, senders=loop["N"]),
            masks=pack_mask(golden.rows(f"r{r - 1}/", loop["N"], "/train_mask") > 0).to(device),
            receivers=pack_mask(golden.rows(f"r{r}/", loop["N"], "/train_mask") > 0).to(device),
            over="neighbours",
        )
        assert torch.equal(got.cpu(), golden.rows(f"r{r}/", loop["N"], "/start"))
