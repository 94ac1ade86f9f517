"""The study of transfer: PRMs of other domains are tested on a domain's own steps, beside its own PRM."""

import numpy as np

from experiments.studies import transfer


def test_own_domain_beats_one_with_the_opposite_sign_and_equals_its_twin():
    def domain(sign: int, seed: int) -> transfer.Domain:
        rng = np.random.default_rng(seed)
        rows = [rng.normal(size=(8, 3)).astype(np.float32) for _ in range(40)]
        classes = [np.append((sign * row[:-1, 0] > 0).astype(int), -1) for row in rows]
        return transfer.Domain(rows, classes, [f"problem {i}" for i in range(40)])

    rows = transfer.rows_of({"a": domain(1, 0), "twin": domain(1, 1), "opposite": domain(-1, 2)})
    assert rows[0]["steps"] == 280 and rows[0]["own"]["low"] > 95
    assert rows[0]["opposite less own"]["high"] < -90 and abs(rows[0]["twin less own"]["value"]) < 2


def test_one_chain_per_problem_whatever_their_order():
    records = [{"problem": f"p{i // 3}", "steps": [str(i)]} for i in range(30)]
    kept = transfer.one_a_problem(records)
    assert len(kept) == 10 and kept == transfer.one_a_problem(records[::-1])
