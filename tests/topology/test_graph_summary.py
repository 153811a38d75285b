"""What a run says of its graph."""

import pytest

from lightfed.topology import topology as graph_summary
from lightfed.topology.topology import Full, Ring, Star, summarise


@pytest.mark.parametrize(
    ("topology", "heard", "gap"),
    [(Full(), (4, 4.0, 4), 1.0), (Ring(), (2, 2.0, 2), 0.460655), (Star(), (1, 1.6, 4), 0.5)],
)
def test_degrees_and_gap_of_five_clients(
    topology: object, heard: tuple[int, float, int], gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = summarise(topology, clients=5, seed=0)  # type: ignore[arg-type]
    named = dict(zip(("least_heard", "mean_heard", "most_heard"), heard, strict=True))
    assert found == {
        "class": type(topology).__name__,
        "spectral_gap": pytest.approx(gap, abs=1e-6),
        **named,
    }
    monkeypatch.setattr(graph_summary, "LARGEST", 4)
    many = summarise(topology, clients=5, seed=0)  # type: ignore[arg-type]
    assert many == {"class": type(topology).__name__, **named}
