"""Settings that mean nothing: each is one error, before any work, that names the field or the value.

`refused_settings.json` has the changes of good settings, by what reads them, and what the message has; the kinds that
need a file or a run of their own are read where their tests are.
"""

import dataclasses
import json
from typing import Any

import pytest
from refusing import SETTINGS, bad
from test_experiment_config import EXPERIMENT
from test_huggingface import configured
from tiny import TINY

from jprm.experiment import TargetConfig, override
from jprm.methods.formats.adapters import published
from jprm.methods.formats.huggingface import model_config
from jprm.methods.judge.load import load_judge
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.openai_client import ServerConfig
from jprm.methods.policy.sampler import SamplerConfig
from jprm.methods.rl.credit import CreditConfig
from jprm.methods.verify import sandbox
from jprm.model.transformer import check_model

READERS: dict[str, Any] = {
    "an experiment's overrides": lambda folder, values: override(EXPERIMENT, [values]),
    "a model": lambda folder, values: check_model(dataclasses.replace(TINY, **values)),
    "a target": lambda folder, values: TargetConfig(**values),
    "a credit": lambda folder, values: CreditConfig(**values),
    "a sampler": lambda folder, values: SamplerConfig(**values),
    "a server's policy": lambda folder, values: ServerConfig(**values),
    "a file of a judge": lambda folder, values: load_judge(written(folder, values)),
    "a file of a policy": lambda folder, values: load_policy(written(folder, values)),
    "a file of an adapter": lambda folder, values: published.read(written(folder, values)),
    "Hugging Face's config.json": lambda folder, values: model_config(configured(folder, **values)),
}


def written(folder, values):
    path = folder / "settings.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def as_tuples(values):
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@pytest.mark.parametrize(("kind", "changes", "named"), [(kind, *case) for kind in READERS for case in bad(kind)])
def test_what_means_nothing_is_refused_by_name(tmp_path, monkeypatch, kind, changes, named):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    good, in_file = SETTINGS[kind]["good"], "file" in kind or "config.json" in kind
    values = changes if isinstance(changes, str) else good | (changes if in_file else as_tuples(changes))
    with pytest.raises(ValueError) as error:
        READERS[kind](tmp_path, values)
    assert named in str(error.value) and len(str(error.value)) < 1500
    assert not in_file or str(tmp_path) in str(error.value)
