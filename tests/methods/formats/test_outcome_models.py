"""Published outcome reward models: every step is scored as transformers scores the conversation that ends with it."""

import json

import numpy as np
import pytest
from families import breadth
from published import (
    LLAMA_CHAT,
    PROBLEM,
    QWEN_CHAT,
    REASON,
    SIZES,
    STEPS,
    bytes_tokenizer,
    chat,
    pieces_tokenizer,
    random_weights,
    tokenizer_of,
)  # fmt: skip
from refusing import refused

import jprm
from jprm.apps import cli
from jprm.methods.decoding.cache import LiveTrees
from jprm.methods.formats.adapters.published import PUBLISHED
from jprm.methods.formats.chat_template import render
from jprm.pack import pack
from jprm.token_tree import token_tree
from jprm.tokenizer import JsonTokenizer, TemplateLayout
from jprm.tree import tree_of

CLOSE = 1e-4
"""Two layers of float32 sums in another order, on logits of a few units."""

FAMILIES = {"Qwen2": (QWEN_CHAT, None), "Llama": (LLAMA_CHAT, "<|begin_of_text|>")}
POOL = {
    "problem": PROBLEM,
    "samples": [{"steps": STEPS}, {"steps": [*STEPS[:2], "So 30."]}, {"steps": STEPS[:1]}, {"steps": ["30", STEPS[0]]}],
}

pytestmark = pytest.mark.usefixtures("rows_of_512")


def make(folder, family, architecture=""):
    """Writes a tiny classifier of sequences with its tokenizer and chat template; returns it and the function that
    scores a chain with it. `own`: the architecture of Qwen's reward model, with its head of two layers."""
    torch = pytest.importorskip("torch", reason=REASON)
    transformers = pytest.importorskip("transformers", reason=REASON)
    from safetensors.numpy import load_file, save_file

    template, bos = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, num_labels=1, pad_token_id=0, rope_theta=100.0)
    model = random_weights(getattr(transformers, f"{family}ForSequenceClassification")(config))
    model.save_pretrained(folder)
    if architecture:
        linear, D = torch.nn.Linear, config.hidden_size
        model.score = random_weights(torch.nn.Sequential(linear(D, D), torch.nn.ReLU(), linear(D, 1)), "head")
        tensors = load_file(folder / "model.safetensors")
        del tensors["score.weight"]
        tensors |= {f"score.{name}": x.detach().numpy() for name, x in model.score.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"architectures": [architecture]}))
    inner, names = bytes_tokenizer(bos)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))
    tokenizer = tokenizer_of(folder)

    def score(steps, problem=PROBLEM):
        ids = chat(tokenizer, template, problem, "\n".join(steps))
        with torch.no_grad():
            return ids, float(model(torch.tensor([ids])).logits[0, 0])

    return folder, score


@pytest.fixture(scope="module", params=["Qwen2", *breadth(["Llama", "Qwen2ForRewardModel"])])
def model(request, tmp_path_factory):
    family, architecture = ("Qwen2", request.param) if request.param.endswith("Model") else (request.param, "")
    folder, score = make(tmp_path_factory.mktemp("outcome") / "model", family, architecture)
    prm = jprm.load(folder)
    name = "qwen-rm" if architecture else "reward"
    assert prm.name.startswith(f"{folder.resolve()} ({name} ") and prm.rule == "last"
    return prm, score


def test_every_step_has_the_reward_of_the_conversation_that_ends_with_it(model):
    prm, score = model
    expected = [score(STEPS[: k + 1])[1] for k in range(len(STEPS))]
    np.testing.assert_allclose(prm.score(PROBLEM, STEPS), expected, atol=CLOSE, rtol=0)
    assert np.ptp(expected) > 100 * CLOSE  # else another position would pass too
    layout = prm.layout
    path = [token for number, step in enumerate(STEPS[:-1]) for token in layout.step(step, number)]
    assert [*layout.problem(PROBLEM), *path, *layout.last(STEPS[-1], len(STEPS) - 1)] == score(STEPS)[0]


def test_white_space_around_steps_stays_where_the_template_keeps_it(model):
    prm, score = model
    steps = [" 2 + 3 = 5\t", "  so 30. "]
    expected = [score(steps[: k + 1])[1] for k in range(len(steps))]
    bare = [score([step.strip() for step in steps[: k + 1]])[1] for k in range(len(steps))]
    wanted = bare if prm.layout.strip else expected
    np.testing.assert_allclose(prm.score(PROBLEM, steps), wanted, atol=CLOSE, rtol=0)
    assert prm.layout.strip == (expected[0] == bare[0])  # a template that trims the conversation


def test_a_pool_shares_prefixes_and_the_ends_are_seen_by_none(model):
    prm, score = model
    (record,) = prm.score_many([POOL])
    for sample in record["samples"]:
        steps = sample["steps"]
        expected = [score(steps[: k + 1])[1] for k in range(len(steps))]
        np.testing.assert_allclose(sample["scores"], expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("chains", [False, True])
def test_rows_too_short_for_the_tree_hold_every_conversation_whole(model, chains):
    prm, score = model
    tree = tree_of(POOL)
    shape = token_tree(tree, prm.layout)
    depths = [len(score(tree_steps(tree, node))[0]) for node in range(len(tree.nodes))]
    packed = pack([shape], max(depths), 3, too_long="error", chains=chains)
    assert len(packed.rows.tokens) > 1
    seen = {}
    for row, slot in zip(*np.nonzero(packed.node_BS >= 0), strict=True):
        end, until = packed.rows.step_end[row, slot], packed.rows.until[row]
        path = [i for i in range(end + 1) if until[i] > end]
        seen[int(packed.node_BS[row, slot])] = packed.rows.tokens[row, path].tolist()
    assert seen == {node: score(tree_steps(tree, node))[0] for node in range(len(tree.nodes))}


def tree_steps(tree, node):
    steps = []
    while node >= 0:
        steps.append(tree.nodes[node].text)
        node = tree.nodes[node].parent
    return steps[::-1]


def test_trees_that_grow_have_the_same_rewards_and_keep_no_ends(model):
    prm, score = model
    trees, scores = LiveTrees(prm), []
    (handle,) = kept = trees.open([PROBLEM])
    for step in STEPS:
        (handle, other), score_P = trees.extend([handle, handle], [step, "So 30."])
        trees.release([other])
        kept.append(handle)
        scores.append(score_P[0])
    np.testing.assert_allclose(scores, prm.score(PROBLEM, STEPS), atol=CLOSE, rtol=0)
    path = [token for number, step in enumerate(STEPS) for token in prm.layout.step(step, number)]
    assert sum(len(node.slots) for node in trees._above(handle)) == len(prm.layout.problem(PROBLEM)) + len(path)
    assert sorted(trees._nodes) == kept


def test_the_command_scores_with_it(tmp_path, capsys):
    folder, score = make(tmp_path / "model", "Qwen2")
    (tmp_path / "pool.jsonl").write_text(json.dumps(POOL) + "\n")
    arguments = ["score", "--model", str(folder), "--input", str(tmp_path / "pool.jsonl")]
    assert cli.main([*arguments, "--output", str(tmp_path / "scored.jsonl")]) == 0
    told = capsys.readouterr().err
    assert f"{folder.resolve()} (reward " in told and "<|im_start|>user\\n{problem}" in told and "rule is last" in told
    (record,) = map(json.loads, (tmp_path / "scored.jsonl").read_text().splitlines())
    np.testing.assert_allclose(record["samples"][0]["scores"][-1], score(STEPS)[1], atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    "template, message",
    [
        ("", "template"),
        ("{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}{% endfor %}", "message 0"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}{{ messages[0]['content'] }}", "message 2"),
        ("{{ raise_exception('no') }}", "template"),
    ],
)
def test_a_folder_without_a_usable_chat_template_is_refused(tmp_path, template, message):
    folder, _ = make(tmp_path / "model", "Qwen2")
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": template}))
    refused(ValueError, message, jprm.load, folder)


def test_a_system_message_goes_through_the_folders_own_chat_template(tmp_path):
    folder, _ = make(tmp_path / "model", "Qwen2")
    layout = jprm.load(folder).layout
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEM}]
    ids = layout.problem(PROBLEM, "Be brief.")
    wanted = layout.tokenizer.encode_control(render(QWEN_CHAT, talk, {}), special=False)
    assert len(wanted) > 10 and ids[: len(wanted)] == wanted
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN_CHAT
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": refusing}))
    with pytest.raises(ValueError, match="system message"):
        jprm.load(folder).layout.problem(PROBLEM, "Be brief.")


def test_a_first_step_begins_a_word_behind_a_control_token_as_a_later_one_does_not():
    """SentencePiece begins a text with a word start; text that continues another has none."""
    tokenizer = JsonTokenizer(pieces_tokenizer()[0])
    end = tokenizer.token_id("[PRM]")
    layout = TemplateLayout(tokenizer, ("{problem}[PRM]",), ("{step}\n",), closing=("{step}[PRM]",), ids={"[PRM]": end},
                            joined=True)  # fmt: skip
    start = tokenizer.encode("7")[:1]
    assert layout.step("7", 0)[:1] == layout.last("7", 0)[:1] == start
    assert layout.step("7", 1)[:1] == layout.last("7", 1)[:1] != start


def test_a_record_of_ones_own_may_close_its_chains(tmp_path):
    folder, score = make(tmp_path / "model", "Qwen2")
    record = {"like": "reward", "chat": False, "problem": "Q: {problem}\nA: ", "closing": "{step}<|im_end|>",
              "tokens": {"<|im_end|>": None}}  # fmt: skip
    (folder / "adapter.json").write_text(json.dumps(record))
    layout = jprm.load(folder).layout
    assert layout.last("31", 1) == [*layout.tokenizer.encode("31"), layout.tokenizer.token_id("<|im_end|>")]
    (folder / "adapter.json").write_text(json.dumps(record | {"chat": True}))
    refused(ValueError, "template", jprm.load, folder)
    assert PUBLISHED["reward"].chat
