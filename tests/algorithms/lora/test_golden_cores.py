"""FedDPA, Fed-SB and RAVAN against recorded rounds."""

import pytest
from torch import Tensor

from tests.algorithms.lora.recorded_cores import Recorded
from tests.small import GOLDEN

FOLDER = GOLDEN / "lora_cores"
CASES = sorted(path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob("*/*.json"))


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    off = (found - wanted).norm()
    assert off <= 1e-5 * wanted.norm() + 1e-7, f"{what}: {off / wanted.norm()}"


def check(own: dict[str, Tensor], recorded: Recorded, prefix: str) -> None:
    """Compare all tensors that are recorded below a prefix."""
    names = [name for name in recorded.tensors if name.startswith(f"{prefix}/")]
    assert names
    for name in names:
        close(own[name.removeprefix(f"{prefix}/")], recorded.tensors[name], name)


@pytest.mark.parametrize(("method", "case"), [path.parts for path in CASES])
def test_rounds_are_those_recorded(method: str, case: str) -> None:
    recorded = Recorded(method, case)
    about, fleet = recorded.about, recorded.fleet

    for t, results in enumerate(about["results"]):
        totals = fleet.ledger.totals.copy()
        metrics = recorded.run(t)
        for client in results["active"]:
            check(recorded.started[t, client, 0], recorded, f"r{t}/sent/{client}")
            if "sgd" in about:
                trained = recorded.named(client, fleet.row(client).floats)
                check(trained, recorded, f"r{t}/local/{client}")

        error = results["aggregation_error"]
        assert metrics["aggregation_error"] == pytest.approx(error["all"], abs=1e-5)
        worst = max(value for name, value in error.items() if name != "all")
        assert metrics["aggregation_error_worst"] == pytest.approx(worst, abs=1e-5)

        for layer in recorded.layers:
            for name, value in recorded.server(layer).items():
                wanted = recorded.tensors[f"r{t}/server/{layer}/{name}"]
                close(value, wanted, f"r{t}/server/{layer}/{name}")
        server = recorded.rule.model.layout.floats.views(recorded.rule.model.floats)
        for name in ("weight", "bias"):
            close(server[f"head.{name}"], recorded.tensors[f"r{t}/server/head/{name}"], name)

        spent = (fleet.ledger.totals - totals) / 4
        for number, values in results["values"].items():
            of_client = spent[int(number)]
            down = sum(values[f"down_{part}"] for part in ("adapters", "head", "base"))
            assert of_client[fleet.ledger.DOWN] == down
            assert of_client[fleet.ledger.UP] == values["up_adapters"] + values["up_head"]

    for client in range(len(about["clients"])):
        row = fleet.deployed(client).row(client).floats
        check(recorded.named(client, row), recorded, f"final/sent/{client}")

        # What the client's module computes: of FedDPA it is a mixture.
        with fleet.deployed(client).bound(client) as module:
            for layer in recorded.layers:
                adapted = module.layers[layer]
                update = adapted.scaling * adapted.up.flatten(1) @ adapted.down.flatten(1)
                prefix = f"final/deployed/{client}/{layer}/update"
                if method != "feddpa":
                    prefix = f"final/sent/{client}/{layer}/product"
                close(update, recorded.tensors[prefix], prefix)
