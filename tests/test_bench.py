"""What the benchmarks count: FLOPs, pairs and padding against closed forms, and the page that they write."""

import json
import pathlib
import sys

import numpy as np
import pytest
from tiny import TINY, packed_trees, random_tree, visible

from jprm.apps.plan import counts

BENCH = pathlib.Path(__file__).resolve().parent.parent / "experiments" / "bench"
sys.path.insert(0, str(BENCH))

import attention  # noqa: E402
import results  # noqa: E402
import yardsticks  # noqa: E402


def test_pairs_are_what_the_rule_shows_of_real_tokens():
    packed = packed_trees([random_tree(seed) for seed in range(5)])
    real = yardsticks.real_tokens(packed.rows)
    assert real.sum() == packed.report.tokens < real.size
    assert yardsticks.visible_pairs(packed.rows) == np.asarray(visible(packed.rows.until))[real].sum()


@pytest.mark.parametrize("training", [True, False])
def test_flops_of_a_chain_are_those_of_the_plan(training):
    T = 48
    trained = ["decoder/embed", *(f"decoder/layers_0/{name}" for name in counts.matrices(TINY))] if training else []
    expected = counts.model_flops(TINY, trained, rows=1, tokens=T, slots=0)
    assert yardsticks.model_flops(TINY, T, T * (T + 1) // 2, training) == expected


@pytest.mark.parametrize("way", ["paths", "jax.nn"])
def test_attention_is_measured_on_a_chain(way, tmp_path):
    found = attention.measure(way, "chain", 256, tmp_path)
    assert found["seconds"] > 0 and found["bytes"] > 0
    # Of 256 x 256 pairs T (T + 1) / 2 are needed.
    assert found["needed"] == pytest.approx((256 * 257 / 2) / {"paths": attention_pairs(256), "jax.nn": 256**2}[way])


def attention_pairs(T: int) -> int:
    """Returns the pairs that blocks of 128 queries compute: each its own and whole chunks of 256 keys before it."""
    return sum(128 * (128 + 256 * -(-start // 256)) for start in range(0, T, 128))


def test_a_figure_has_three_digits_or_is_whole():
    said = [results.number(x) for x in (None, 0, 0.012345, 1.2345, 56.789, 12345.6, 1e9)]
    assert said == ["–", "0", "0.0123", "1.23", "56.8", "12,346", "1,000,000,000"]


def test_the_page_holds_what_was_measured(tmp_path, monkeypatch):
    """From the last line that a script prints, whatever it says before it."""
    child = 'print("round 1"); print(json.dumps({"bench": "attention", "rows": [row]}))'
    row = {"way": "paths", "shape": "chain", "T": 4096, "seconds": 1.5, "peak": 1.75, "peak_rss": None, "needed": 0.5}
    (tmp_path / "attention.py").write_text(f"import json\nrow = json.loads({json.dumps(row)!r})\n{child}\n")
    (tmp_path / "train_speed.py").write_text("raise SystemExit('no data')\n")
    monkeypatch.setattr(results, "HERE", tmp_path)
    monkeypatch.setattr(results, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(sys, "argv", ["results.py", "attention", "train_speed", "--", "--no-peer"])
    with pytest.raises(SystemExit) as end:
        results.main()
    assert end.value.code == 1  # one of the two failed
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| chain | 4,096 | `paths` | 1.5 | 1.75 | – | 50.0 % |" in page and "## Training" not in page
