"""vLLM's /pooling: the logits of token ids, at every token or at the tokens that end steps."""

import base64
import dataclasses

import numpy as np
import pytest
from test_serve import CHAIN, call, engine, post, prm  # noqa: F401  (fixtures, which tests name as arguments)

from jprm.apps.serve.engine import Engine
from jprm.apps.serve.pooling import activated
from jprm.model.heads import find, of_names
from jprm.tokenizer import TemplateLayout


def ids_of(prm, chain=CHAIN):  # noqa: F811
    """Returns a chain's ids and the places of its steps' ends."""
    ids, ends = list(prm.layout.problem(chain["problem"])), []
    for number, step in enumerate(chain["steps"]):
        ids += prm.layout.step(step, number)
        ends.append(len(ids) - 1)
    return ids, ends


def pool(engine, **body):  # noqa: F811
    (got,) = call(engine, post("/pooling", body))
    return got.json()


def refused(engine, **body):  # noqa: F811
    (got,) = call(engine, post("/pooling", body))
    assert got.status_code == 400
    return got.json()["error"]["message"]


@pytest.fixture
def marked(prm):  # noqa: F811
    """The model with a layout in which one token ends every step."""
    tokenizer = prm.layout.tokenizer
    (end,) = tokenizer.encode(")")[-1:]
    running = Engine(dataclasses.replace(prm, layout=TemplateLayout(tokenizer, ("{problem}", "\n"), ("{step}", "<end>"),
                                                                ids={"<end>": end})), 256, "tiny")  # fmt: skip
    yield running
    running.close()


def test_logits_of_every_token_are_those_of_steps_and_of_shorter_chains(engine, prm):  # noqa: F811
    """A score is read at a step's last token and depends on nothing after it, so both must agree.

    Rows of another length round differently: 1e-6 is ten units in the last place of a float32 near 1.
    """
    ids, ends = ids_of(prm)
    (row,) = pool(engine, input=ids, use_activation=False)["data"]
    assert row["index"] == 0 and row["object"] == "pooling" and len(row["data"]) == len(ids)
    logit_TC = np.array(row["data"])
    np.testing.assert_allclose(logit_TC[ends], prm.logits(**CHAIN), atol=1e-6)
    for n in (1, 3, len(ids) // 2):
        np.testing.assert_allclose(logit_TC[n - 1], prm.token_logits(ids[:n], [n - 1])[0], atol=1e-6)


def test_several_chains_and_their_probabilities(engine, prm):  # noqa: F811
    ids, ends = ids_of(prm)
    answer = pool(engine, model="tiny", task="token_classify", input=[ids, ids[:9]])
    assert answer["object"] == "list" and answer["model"] == "tiny" and answer["id"].startswith("pooling-")
    assert answer["usage"] == {
        "prompt_tokens": len(ids) + 9, "total_tokens": len(ids) + 9, "completion_tokens": 0,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip
    assert list(answer) == ["id", "object", "created", "model", "data", "usage"]  # as of vLLM 0.32
    whole, part = (np.array(data["data"]) for data in answer["data"])
    np.testing.assert_allclose(whole[:9], part, atol=1e-6)
    np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-6)
    (packed,) = pool(engine, input=ids, encoding_format="base64")["data"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(whole.shape), whole.astype(np.float32)
    )
    np.testing.assert_allclose(whole[ends], activated(prm.logits(**CHAIN)), atol=1e-6)


def test_equal_chains_are_computed_once(engine, monkeypatch):  # noqa: F811
    asked, run = [], engine.run
    monkeypatch.setattr(engine, "run", lambda function, tokens=0: asked.append(tokens) or run(function, tokens))
    (got,) = call(engine, post("/pooling", {"input": [[1, 2], [3], [1, 2]] * 5}))
    rows = [row["data"] for row in got.json()["data"]]
    assert len(asked) == 2 and rows[0] == rows[2] == rows[14] != rows[1] and [len(x) for x in rows[:2]] == [2, 1]


def test_a_layout_with_a_token_that_ends_steps_gives_these_rows_alone(marked):
    prm = marked.prm  # noqa: F811
    ids, ends = ids_of(prm)
    (row,) = pool(marked, input=ids, use_activation=False)["data"]
    np.testing.assert_allclose(row["data"], prm.logits(**CHAIN), atol=1e-6)
    assert len(ends) == len(CHAIN["steps"])
    (none,) = pool(marked, input=ids[: ends[0]])["data"]
    assert none["data"] == []


def test_several_labels_at_once_have_a_sigmoid_each(prm):  # noqa: F811
    """As vLLM answers for `problem_type: multi_label_classification`."""
    names = find(prm.config.head).channels
    running = Engine(dataclasses.replace(prm, readout=of_names("sigmoid", names).readout), 256, "tiny")
    ids, _ = ids_of(prm)
    (row,) = pool(running, input=ids)["data"]
    logit_TC = prm.token_logits(ids, range(len(ids)))
    np.testing.assert_allclose(row["data"], 1 / (1 + np.exp(-logit_TC)), atol=1e-6)
    (got,) = call(running, post("/classify", {"input": ids}))
    (answer,) = got.json()["data"]
    np.testing.assert_allclose(answer["probs"], row["data"][-1], atol=1e-6)
    assert answer["label"] == names[int(np.argmax(answer["probs"]))] and answer["num_classes"] == len(names)
    running.close()


@pytest.mark.parametrize("place", [-1, 3])
def test_token_logits_refuses_a_place_outside_the_chain(prm, place):  # noqa: F811
    with pytest.raises(ValueError, match="from 0 to 2"):
        prm.token_logits([1, 2, 3], [0, place])


def test_activation_is_softmax_or_the_sigmoid_of_one():
    np.testing.assert_allclose(activated(np.array([[0.0, np.log(3)]])), [[0.25, 0.75]])
    np.testing.assert_allclose(activated(np.array([[-np.log(3)]])), [[0.25]])
    np.testing.assert_allclose(activated(np.array([[1e4, 0.0, -1e4]])), [[1, 0, 0]])
    np.testing.assert_allclose(activated(np.array([[1e4, 0.0, -1e4]]), several=True), [[1, 0.5, 0]])
