"""Samplers on hosts of their own: real processes of tests/sglang_server.py, killed while the learner learns."""

import contextlib
import dataclasses
import json

import httpx2
import numpy as np
import pytest
from pod import QUICK, Servers, environment
from refusing import refused
from test_rl_processes import numbers_of
from tiny_rl import by_engine, servable
from tiny_run import lines, one_device

from jprm.experiment import OptimizerConfig, from_json, to_json
from jprm.methods.rl import loop
from jprm.methods.rl.config import RLExperiment
from jprm.methods.rl.engine import EngineConfig
from jprm.train.callbacks import Watchdog


@contextlib.contextmanager
def samplers(folder, count):
    """Engines that sample by the policy of `folder/data`."""
    command = ("-m", "sglang_server", str(servable(folder / "data") / "policy"))
    with Servers(folder / "logs", count, *command, env=QUICK | environment()) as servers:
        servers.answer()
        yield servers


@pytest.mark.slow
@pytest.mark.parametrize("stale", [0, 1])
def test_samplers_that_are_killed_do_not_end_the_learner(tmp_path, monkeypatch, stale):
    """One from update 2 on, both at 4; they are back at update 5. What is drawn does not depend on who draws it."""
    data, at = tmp_path / "data", Watchdog.at
    with samplers(tmp_path, 2) as servers, one_device():
        config = by_engine(
            data, servers.urls, updates=6, minibatches=1, evaluate_every=6, reference=False, stale=stale,
            objective_options={"truncate": 2.0} if stale else {},
            optimizer=OptimizerConfig(learning_rate=0.01, decay="constant", eps=0.1),
        )  # fmt: skip
        whole = loop.train(config, tmp_path / "whole")

        def killing(self, update, phase):
            at(self, update, phase)
            if (update, phase) == (2, "sampling"):
                servers.kill("server0")
            elif (update, phase) == (4, "sampling"):
                servers.kill()
            elif (update, phase) == (5, "sampling"):
                servers.answer()

        monkeypatch.setattr(Watchdog, "at", killing)
        result = loop.train(config, tmp_path / "run")
    assert result["finished"] and result["update"] == 6
    rows = [row for row in lines(tmp_path / "run") if "loss" in row]
    assert sum(row["left_out"] for row in rows) >= 2 and sum(row["drawn_here"] for row in rows) >= 16
    assert rows[5]["drawn_here"] == 0 and rows[5]["left_out"] == 0
    if not stale:  # else a sample may be under way while parameters are pushed
        before, after = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "run")
        assert max(np.abs(before[name] - after[name]).max() for name in before) < 1e-5  # float32 rounding
        assert result["evaluations"][-1]["gold_P"] == whole["evaluations"][-1]["gold_P"]


@pytest.mark.slow
def test_what_an_engine_is_asked_wrongly_is_refused_and_it_goes_on(tmp_path):
    with samplers(tmp_path, 1) as servers:
        (url,) = servers.urls
        params = {"max_new_tokens": 4, "sampling_seed": 3, "temperature": 1.0}

        def status(path, body):
            return httpx2.post(url + path, json=body, timeout=60)

        wrong = [
            ("/generate", {"input_ids": [99999], "sampling_params": params}, "input_ids"),
            ("/generate", {"input_ids": [3], "sampling_params": params | {"max_new_tokens": 0}}, "max_new_tokens"),
            ("/generate", {"sampling_params": params}, "input_ids"),
            ("/update_weights_from_disk", {"model_path": str(tmp_path / "nothing")}, "nothing"),
        ]
        for path, body, said in wrong[:3]:
            reply = status(path, body)
            assert reply.status_code == 400 and said in reply.json()["error"]["message"]
        reply = status("/generate", {"input_ids": [3, 4], "sampling_params": params}).json()["meta_info"]
        again = status("/generate", {"input_ids": [3, 4], "sampling_params": params}).json()["meta_info"]
        assert reply == again and 1 <= len(reply["output_token_logprobs"]) <= 4
        ids = [3, 4, *(i for _, i, _ in reply["output_token_logprobs"])]
        forced = status("/generate", {"input_ids": ids, "logprob_start_len": 0, "sampling_params": params}).json()
        actual = [x for x, _, _ in forced["meta_info"]["input_token_logprobs"]][2:]
        np.testing.assert_allclose(actual, [x for x, _, _ in reply["output_token_logprobs"]], atol=1e-4)
        reply = status(*wrong[3][:2])
        assert reply.status_code == 400 and "nothing" in reply.json()["error"]["message"]
        assert status("/update_weights_from_disk", {"model_path": str(tmp_path / "data/policy")}).json()["success"]


def test_addresses_are_checked_and_read_from_json(tmp_path):
    config = by_engine(tmp_path, ("http://a:1", "http://b:2/"))
    assert from_json(RLExperiment, json.loads(json.dumps(to_json(config)))) == config
    assert config.engine.urls == ("http://a:1", "http://b:2")
    assert dataclasses.replace(config.engine, url="http://a:1").urls == ("http://a:1",)
    for url in ("a:1", ("http://a:1", "http://a:1/"), ()):
        refused(ValueError, "engine.url", EngineConfig, url)
    refused(ValueError, "key_variable", EngineConfig, "http://a:1", key_variable="JPRM_NO_SUCH_VARIABLE")
