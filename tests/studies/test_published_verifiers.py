"""The page of published verifiers: figures from published scores, and samples' answers judged again."""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest

from experiments.studies import published

SHARED = pathlib.Path(os.environ.get("JPRM_DATA", "absent"))
needs_data = pytest.mark.skipif(
    not (SHARED / "published_choices").is_dir(), reason="JPRM_DATA has no published choices"
)


def written(folder, problems):
    """A file of pools: the published label goes by the last number, and is wrong if another number follows."""
    records = []
    for i in range(problems):
        samples = []
        for k in range(published.N):
            right = (i + k) % 3 > 0
            text = f"So it is \\boxed{{{7 if right else 8 + k % 2}}}." + " Check: 1." * (k % 5 == 0)
            score = [0.9 if right else 0.3, 0.8]
            samples.append({
                "steps": ["We add.", text], "response": f"We add.\n\n{text}", "published_answer": "7",
                "published_correct": right and k % 5 > 0, "published_scores": {"judge": score, "blind": [0.5, 0.5]},
            })  # fmt: skip
        records.append({"id": i, "problem": f"What is 3 + 4, time {i}?", "answer": "1", "samples": samples})
    path = folder / "qwen_gsm8k_n32.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    return path


def test_samples_are_judged_by_their_text_and_the_truth_of_the_problems_own_file(tmp_path):
    path = written(tmp_path, 6)
    truth_of = {published.normalise(f"What is 3 + 4, time {i}?"): "7" for i in range(6)}
    pool = published.read_pool(path, truth_of)
    expected = np.array([[(i + k) % 3 > 0 for k in range(published.N)] for i in range(6)], float)
    assert (pool.correct_PN == expected).all() and (pool.published_PN != expected).any()
    of_ways = published.curves(pool)
    assert (of_ways["judge", "prod", "best"][:, -1] == 1).all()
    np.testing.assert_allclose(of_ways["blind", "min", "best"][:, -1], expected.mean(1))
    assert (of_ways["majority", "", "vote"][:, -1] == 1).all()  # two thirds agree
    np.testing.assert_allclose(of_ways["majority", "", "vote"][:, 0], expected.mean(1), atol=0.25)
    np.testing.assert_allclose(of_ways["any", "", "best"][:, 0], expected.mean(1))
    page = "\n".join([*published.choosing(pool, of_ways), *published.rule_to_take(pool, of_ways)])
    assert "6 problems" in page and "| judge |" in page


def test_a_step_of_several_pieces_has_its_least_score():
    assert published._by_step([0.9, 0.2, 0.5, 0.7], [1, 2, 1]).tolist() == [0.9, 0.2, 0.7]
    np.testing.assert_allclose(published._by_step([[0.3, 0.1, 0.6]], [1]), [0.7])


@needs_data
def test_published_figures_are_reproduced():
    page = "\n".join(published.mr_math(SHARED))
    for verifier, area in {
        "math-shepherd_mistral-7b": "77.3", "reasoneval_llama2-7b": "79.5", "reasoneval_llemma-34b": "90.8",
        "number of steps": "61.4", "gpt4, verdicts right in 75.5": "", "gpt3_5_turbo, verdicts right in 60.4": "",
    }.items():  # fmt: skip
        assert f"| {verifier}" in page and area in page.partition(f"| {verifier}")[2].partition("\n")[0]
    page = "\n".join(published.choices(SHARED / "published_choices/best_of_5.jsonl"))
    row = page.partition("| Qwen2.5-7B-Instruct | Qwen2.5-Math-PRM-7B | 12 |")[2].partition("\n")[0]
    assert "+0.1 [" in row and "+2.1 [" in row and "-0.9 [" in row
