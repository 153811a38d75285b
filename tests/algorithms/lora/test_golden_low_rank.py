"""The rules of federated low-rank adapters against recorded rounds."""

import pytest
import torch
from torch import Tensor

from tests.algorithms.lora.low_rank import Recorded
from tests.small import GOLDEN

CASES = sorted(
    path.relative_to(GOLDEN / "lora").with_suffix("") for path in GOLDEN.glob("lora/*/*.json")
)


# Singular vectors are free in sign: of these rules only products are compared.
FREE = ("flexlora", "fedsvd", "fedmomentum")

# Rules whose float32 sessions are badly conditioned.
TOLERANCES = {("fedsvd", "sgd"): 1e-4, ("fedmomentum", "sgd"): 1e-4, ("fedrot", "sgd"): 1e-3,
              ("flexlora", "sgd"): 1e-4}  # fmt: skip


def close(found: Tensor, wanted: Tensor, what: str, *, tolerance: float = 1e-5) -> None:
    """A client that has pruned itself has zeros in the place of the ranks that it lacks."""
    padded = torch.zeros_like(found, dtype=torch.float64)
    padded[tuple(slice(size) for size in wanted.shape)] = wanted
    off = (found - padded).norm()
    assert off <= tolerance * wanted.norm() + 1e-7, f"{what}: {off / wanted.norm()}"


@pytest.mark.parametrize(("method", "case"), [path.parts for path in CASES])
def test_rounds_are_those_recorded(method: str, case: str) -> None:
    recorded = Recorded(method, case)
    tensors, about, fleet, rule = recorded.tensors, recorded.about, recorded.fleet, recorded.rule
    tolerance = TOLERANCES.get((method, case), 1e-5)
    scales = [own["alpha"] / own["rank"] for own in about["clients"]]

    def same(own: dict[str, Tensor], client: int, prefix: str) -> None:
        for layer in recorded.layers:
            own[f"{layer}/product"] = scales[client] * own[f"{layer}/B"] @ own[f"{layer}/A"]
        names = [name for name in tensors if name.startswith(f"{prefix}/")]
        assert names
        for name in names:
            short = name.removeprefix(f"{prefix}/")
            if method not in FREE or short[-2:] not in ("/A", "/B"):
                close(own[short], tensors[name], name, tolerance=tolerance)

    for t, results in enumerate(about["results"]):
        totals = fleet.ledger.totals.copy()
        metrics = recorded.run(t)
        for client in results["active"]:
            same(recorded.started[t, client], client, f"r{t}/sent/{client}")
            if "sgd" in about and method not in FREE:
                same(recorded.trained[t, client], client, f"r{t}/local/{client}")
            if method == "fedrot":
                row = recorded.named(client, fleet.row(client).floats)
                same(row, client, f"r{t}/up/{client}")
        error = results["aggregation_error"]
        assert metrics["aggregation_error"] == pytest.approx(error["all"], abs=1e-5)
        worst = max(value for name, value in error.items() if name != "all")
        assert metrics["aggregation_error_worst"] == pytest.approx(worst, abs=1e-5)
        for place, layer in enumerate(recorded.layers):
            A, D = rule.server_factors()[place]
            mean = recorded.means[-len(recorded.layers) + place]
            server = {"A": A, "D": D, "product": D @ A, "full": mean.dense}
            server["singular_values"] = torch.linalg.svdvals(mean.dense)
            if rule.changes_base:
                server["W"] = (
                    next(iter(fleet.groups)).live.frozen[f"layers.{layer}.weight"].flatten(1)
                )
            for name, value in server.items():
                wanted = tensors.get(f"r{t}/server/{layer}/{name}")
                if wanted is not None and (method not in FREE or name not in ("A", "D")):
                    close(value, wanted, f"r{t}/server/{layer}/{name}", tolerance=tolerance)
        spent = (fleet.ledger.totals - totals) / 4
        for client, values in results["values"].items():
            down, up = fleet.ledger.DOWN, fleet.ledger.UP
            own = spent[int(client)]
            assert own[up] == values["up_adapters"] + values["up_head"]
            assert own[down] == sum(values[f"down_{part}"] for part in ("adapters", "head", "base"))
        if "kept" in results:
            assert recorded.kept[-len(recorded.layers) :] == [*results["kept"].values()]
        if "rank_after" in results:
            kept = rule.kept[results["active"]]
            assert kept.tolist() == results["rank_after"]
    for client in range(len(about["clients"])):
        rows = fleet.deployed(client)
        own = recorded.named(client, rows.row(client).floats)
        same(own, client, f"final/sent/{client}")
