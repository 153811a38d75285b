"""What other frameworks cost on W1, W2 and W5: measured once, elsewhere, and copied by hand.

CPU time of a round over a loop with load_state_dict for every client, which is slower than this
benchmark's `loop` (by a sixth on W5): torch 2.12.1, two cores, one thread, mostly medians of turns.
Those of the papers' own codes for HeteroFL and DisPFL are over hand-written loops of the same work.
"""

MEASURED: dict[str, dict[str, float]] = {
    "W1": {
        "pfl 0.6.0": 1.35, "blazefl 2.0.3": 1.49, "fluke 0.8.1": 1.83, "fedlab 1.3.0": 1.92,
        "PFLlib d832e76": 2.27, "flwr 1.42.0": 6.3,
    },
    "W2": {
        "pfl 0.6.0": 0.84, "fedlab 1.3.0": 0.89, "blazefl 2.0.3": 0.92, "fluke 0.8.1": 1.05,
        "PFLlib d832e76": 1.08, "flwr 1.42.0": 1.35,
    },
    "W5": {
        "pfl 0.6.0": 1.52, "fedlab 1.3.0": 1.86, "blazefl 2.0.3": 1.91, "fluke 0.8.1": 2.38,
        "PFLlib d832e76": 5.6, "flwr 1.42.0": 24.0,
    },
    "W3": {"official code, training only": 1.11, "official code, as published": 12.7},
    "W4": {"official code, training only": 1.39, "official code, as published": 3.06},
}  # fmt: skip
