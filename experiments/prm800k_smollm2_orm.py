"""The leaf model beside `prm800k_smollm2.py`: the same base, chains, tokens and steps, one label a chain.

PRM800K phase 1 has no finished solution that is incorrect, so the chains are all of its root-to-leaf paths, finished or
not, and a chain is correct if none of its steps is rated -1. Only steps that are not rated -1 are continued, so this
label is the rating of the chain's own last step: the model learns from step ratings, at leaves alone, and is no outcome
model in the usual sense.

On 2 CPU cores, beside other work: 12 minutes for the head's fit and 56 for the updates. In %, 95 % intervals over
problems, its score read at the end of every step: phase1_test step AUROC 64.7 [61.1, 67.8] (PRM 67.2 [63.2, 70.7]),
average precision of errors 51.4 [43.3, 58.1], alternatives 56.8 [52.4, 60.6], accuracy at 0.5 56.6 [53.1, 59.9], first
error found, F1 at 0.5, 15.3 [9.5, 21.5]. GSM8K pool, best of 19: last 49.6 [43.6, 55.6], prod 52.0 [46.0, 58.0], min
49.0 [43.1, 54.8]; one sample 53.4, majority vote 64.5. ProcessBench F1: gsm8k 2.9 [0.0, 6.3] at 0.5, 23.9 [18.4, 29.5]
tuned on gsm8k, 23.2 [17.8, 28.3] cross-fitted; math 6.4 [3.7, 8.9], 20.8 [17.9, 23.4], 21.4 [18.4, 24.1]. The trivial
baselines are in `prm800k_smollm2.py`; step length beats it there too.
"""

import dataclasses
import os
import pathlib
import runpy

from jprm.experiment import Experiment, TargetConfig

DATA = os.environ.get("JPRM_PREPARED_OUTCOMES", "data/prm800k_outcomes")


def experiment() -> Experiment:
    prm = runpy.run_path(str(pathlib.Path(__file__).with_name("prm800k_smollm2.py")))["experiment"]()
    return dataclasses.replace(
        prm,
        name="prm800k_smollm2_orm",
        data=dataclasses.replace(prm.data, train=(DATA,), supervise="outcome"),
        target=TargetConfig(labels="value", neutral="none", after_error="keep"),
    )
