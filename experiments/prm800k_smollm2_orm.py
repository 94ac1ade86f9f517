"""The outcome model beside `prm800k_smollm2.py`: the same base, chains, tokens and steps, one label a chain.

An outcome reward model (ORM) sees at the end of a chain whether the chain is right, and no label before. PRM800K phase
1 has no finished solution that is wrong, so the chains are all of its root-to-leaf paths, finished or not, and a chain
is right if none of its steps is rated -1.
"""

import dataclasses
import os
import pathlib
import runpy

from jprm.train.config import Experiment
from jprm.train.targets import TargetConfig

DATA = os.environ.get("JPRM_PREPARED_OUTCOMES", "data/prm800k_outcomes")


def experiment() -> Experiment:
    prm = runpy.run_path(str(pathlib.Path(__file__).with_name("prm800k_smollm2.py")))["experiment"]()
    return dataclasses.replace(
        prm,
        name="prm800k_smollm2_orm",
        data=dataclasses.replace(prm.data, train=(DATA,), supervise="outcome"),
        target=TargetConfig(labels="value", neutral="none", after_error="keep"),
    )
