"""ProcessBench F1 of published models, in percent, to stand beside a model's own.

Measured by their authors, each at its own threshold. Prompted models (critics) read the whole chain and write an
analysis, at many times the cost.
"""

from __future__ import annotations

SPLITS = ("gsm8k", "math", "olympiadbench", "omnimath")

ZHENG = "arXiv 2412.06559"
ZHANG = "arXiv 2501.07301"
ZHAO = "arXiv 2504.00891"

PROCESSBENCH = (
    # name, kind, F1 of the splits in the order of SPLITS, average of the four, source
    ("Math-Shepherd-PRM-7B", "PRM", (47.9, 29.5, 24.8, 23.8), 31.5, ZHENG),
    ("RLHFlow-PRM-Mistral-8B", "PRM", (50.4, 33.4, 13.8, 15.8), 28.4, ZHENG),
    ("RLHFlow-PRM-Deepseek-8B", "PRM", (38.8, 33.8, 16.9, 16.9), 26.6, ZHENG),
    ("Skywork-PRM-1.5B", "PRM", (59.0, 48.0, 19.3, 19.2), 36.4, ZHENG),
    ("Skywork-PRM-7B", "PRM", (70.8, 53.6, 22.9, 21.0), 42.1, ZHENG),
    ("EurusPRM-Stage2", "PRM", (47.3, 35.7, 21.2, 20.9), 31.3, ZHANG),
    ("Qwen2.5-Math-7B-Math-Shepherd", "PRM", (62.5, 31.6, 13.7, 7.7), 28.9, ZHANG),
    ("Qwen2.5-Math-7B-PRM800K", "PRM", (68.2, 62.6, 50.7, 44.3), 56.5, ZHENG),
    ("Qwen2.5-Math-PRM-7B", "PRM", (82.4, 77.6, 67.5, 66.3), 73.5, ZHANG),
    ("Qwen2.5-Math-PRM-72B", "PRM", (87.3, 80.6, 74.3, 71.1), 78.3, ZHANG),
    ("Qwen2.5-Math-RM-72B", "ORM", (43.5, 47.2, 37.6, 27.4), 38.9, ZHANG),
    ("GenPRM-7B (pass@1)", "generative PRM", (78.7, 80.3, 72.2, 69.8), 75.2, ZHAO),
    ("GPT-4o", "prompted critic", (79.2, 63.6, 51.4, 53.5), 61.9, ZHENG),
    ("o1-mini", "prompted critic", (93.2, 88.9, 87.2, 82.4), 87.9, ZHENG),
)
