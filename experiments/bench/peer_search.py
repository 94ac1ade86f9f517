"""The peer of search_speed.py, run by the peers' interpreter: whole chains scored again in every round of a search.

Reads JSON from standard input: `rounds`, the token ids of every chain of every round, and `bench`, the folder of
peer_train.py, which makes the float32 model. As search-and-learn does, a round's chains are scored in batches of 4,
each padded to its longest. Prints one JSON line: seconds of all rounds, and cells, the tokens computed with padding.
"""

import json
import os
import pathlib
import runpy
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
BATCH = 4


def main():
    request = json.load(sys.stdin)
    import torch
    from transformers import AutoModelForTokenClassification

    torch.set_num_threads(os.cpu_count())
    folder = pathlib.Path.home() / ".cache/jprm-peer/smollm2-135m"
    folder.mkdir(parents=True, exist_ok=True)
    runpy.run_path(f"{request['bench']}/peer_train.py")["base_model"](folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32).eval()

    def score(batch):
        width = max(map(len, batch))
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in batch])
        mask = torch.tensor([[1] * len(chain) + [0] * (width - len(chain)) for chain in batch])
        with torch.no_grad():
            torch.softmax(model(input_ids=tokens, attention_mask=mask).logits, -1)[..., 1]
        return tokens.numel()

    score(request["rounds"][0][:BATCH])
    start, cells = time.perf_counter(), 0
    for chains in request["rounds"]:
        for i in range(0, len(chains), BATCH):
            cells += score(chains[i : i + BATCH])
    print(json.dumps({"peer": "transformers, whole chains", "seconds": time.perf_counter() - start, "cells": cells}))


if __name__ == "__main__":
    main()
