"""The sampler: what it samples, where it stops, and that neither batch nor mesh changes a sample."""

import dataclasses
import json
import math
import types

import jax
import numpy as np
import pytest
from refusing import refused
from tiny import GEMMA, TINY, params, placed
from tiny_run import experiment, make_data, one_device, save_tokenizer

import jprm
from jprm.checkpoints import store
from jprm.experiment import to_json
from jprm.methods.decoding import decode
from jprm.methods.policy import sampler
from jprm.methods.policy.load import load_policy
from jprm.methods.policy.protocol import Prefix
from jprm.methods.policy.sampler import Sampler, SamplerConfig
from jprm.model.mesh import MeshConfig, make_mesh
from jprm.model.transformer import head_logits
from jprm.tokenizer import load_tokenizer, prompt_layout
from jprm.train.state import initial_state

MODEL = dataclasses.replace(TINY, head="language")
PREFIXES = (Prefix("abc"), Prefix("the problem", ("one step", "two")))
N = 4


@dataclasses.dataclass(frozen=True)
class Letters:
    """A letter a token: 0 is a newline, 1 the end of the text, 2 a space, 3 two newlines."""

    eos: int | None = 1
    bos = None
    vocab_size = 64
    pieces = ("\n", "<end>", " ", "\n\n", *(chr(61 + i) for i in range(4, 64)))

    def encode(self, text):
        return [self.pieces.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def token_id(self, token):
        return {"<end>": 1}.get(token)


def weights(scale=0.5, model=MODEL):
    """Flatter than those of the other tests, so that every token is drawn."""
    return params(model) | {"decoder": params(model)["decoder"] | {"embed": params(model)["decoder"]["embed"] * scale}}


def make(mesh=None, eos=1, model=MODEL, **options):
    mesh = mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    options = SamplerConfig(**{"max_tokens": 40, "top_p": 0.97, **options})
    return Sampler(placed(weights(model=model), mesh), model, Letters(eos), mesh, options, "letters")


@pytest.fixture(scope="module")
def policy():
    return make(temperature=1.0)


@pytest.fixture(scope="module")
def chains(policy):
    return policy.sample(PREFIXES, N, until="end", seed=5)


def log_probabilities(ids):
    """(T, V): of the token after each, by computing the row as a whole."""
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(ids)] = ids
    x_BTD, _ = jax.jit(decode.forward, static_argnums=1)(weights(), MODEL, tokens, np.arange(128)[None])
    logit_TV = np.asarray(head_logits(weights(), MODEL, x_BTD[0]))
    return np.asarray(jax.nn.log_softmax(logit_TV))[: len(ids)]


def assert_same(actual, expected):
    """The same tokens; log-probabilities up to the order of float32 sums."""
    for a, b in zip(sum(actual, []), sum(expected, []), strict=True):
        assert dataclasses.replace(a, logprob=None) == dataclasses.replace(b, logprob=None)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def prompt_ids(prefix):
    return Letters().encode("\n".join([prefix.problem, *prefix.steps, ""]))


def test_greedy_is_the_most_probable_token_of_the_whole_row_each_time():
    policy = make(temperature=0.0, eos=None)
    for prefix, samples in zip(PREFIXES, policy.sample(PREFIXES, 2, until="end", seed=0), strict=True):
        assert samples[0] == samples[1]
        ids = prompt_ids(prefix)
        for _ in range(40):
            ids.append(int(log_probabilities(ids)[-1].argmax()))
        text = Letters().decode(ids[len(prompt_ids(prefix)) :])
        assert samples[0].steps == tuple(step.strip() for step in text.split("\n") if step.strip())
        assert (samples[0].tokens, samples[0].finish_reason) == (40, "length")


def test_log_probabilities_are_the_models_own(policy, chains, monkeypatch):
    written = []
    monkeypatch.setattr(Letters, "decode", lambda self, ids: written.append(ids) or "")
    policy.sample(PREFIXES, N, until="end", seed=5)
    for i, sample in enumerate(sum(chains, [])):
        ids = written[i] + [1] * (sample.finish_reason == "stop")
        before = prompt_ids(PREFIXES[i // N])
        log_TV = log_probabilities([*before, *ids])[len(before) - 1 : -1]
        expected = log_TV[np.arange(len(ids)), ids].sum()
        assert sample.logprob == pytest.approx(expected, abs=1e-3)  # up to 40 float32 terms, each 1e-5 off at most
        assert sample.tokens == len(ids)


def test_a_step_is_the_beginning_of_the_chain(policy, chains):
    steps = policy.sample(PREFIXES, N, until="step", seed=5)
    reasons = set()
    for sample, chain in zip(sum(steps, []), sum(chains, []), strict=True):
        reasons |= {sample.finish_reason, chain.finish_reason}
        assert chain.finish_reason in ("stop", "length")
        assert sample.steps == chain.steps[:1]
        assert sample.tokens < chain.tokens if sample.finish_reason == "step" else sample.tokens == chain.tokens
    assert reasons == {"step", "stop", "length"}


def test_a_draw_has_its_number_whatever_it_is_drawn_with(policy, chains):
    assert_same(policy.sample(PREFIXES[::-1], N, until="end", seed=5)[::-1], chains)
    later = policy.sample(PREFIXES, N, until="end", seed=7)
    for samples, chain in zip(later, chains, strict=True):
        assert [s.steps for s in samples[:2]] == [s.steps for s in chain[2:]]
    drawn = [sample.steps for samples in (*later, *chains) for sample in samples]
    assert len(set(drawn)) == 12  # four of the sixteen are the same draws


def test_more_draws_than_rows_are_decoded_in_turns(chains):
    assert_same(make(temperature=1.0, rows=4).sample(PREFIXES, N, until="end", seed=5), chains)


@pytest.mark.breadth
def test_every_mesh_draws_as_one_device_does(chains):
    policy = make(make_mesh(MeshConfig(2, 2, 2)), temperature=1.0)
    assert_same(policy.sample(PREFIXES, N, until="end", seed=5), chains)


@pytest.mark.slow
def test_every_mesh_draws_from_a_model_with_windows_as_one_device_does():
    model = dataclasses.replace(GEMMA, head="language")
    expected = make(model=model, temperature=1.0).sample(PREFIXES, N, until="end", seed=5)
    assert_same(
        make(make_mesh(MeshConfig(2, 2, 2)), model=model, temperature=1.0).sample(PREFIXES, N, until="end", seed=5),
        expected,
    )


def test_samples_grow_beyond_the_room_they_start_with(policy, monkeypatch, chains):
    monkeypatch.setattr(sampler, "SHORTEST_SAMPLE", 16)
    assert_same(make(temperature=1.0).sample(PREFIXES, N, until="end", seed=5), chains)


@pytest.mark.parametrize("split", [(1, 1, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_rows_whose_samples_have_ended_are_dropped_and_the_rest_goes_on(monkeypatch, split):
    """Of 16 problems 4 go on after 32 tokens. All samples are those of a batch that keeps its rows."""
    monkeypatch.setattr(sampler, "SHORTEST_SAMPLE", 4)
    policy = make(make_mesh(MeshConfig(*split), jax.devices()[: math.prod(split)]), temperature=1.0, max_tokens=64)
    problems, lengths, kept = [Prefix(chr(65 + i)) for i in range(16)], [], decode.of_rows

    def counted(state, rows, m):
        lengths.append(len(rows))
        return kept(state, rows, m)

    monkeypatch.setattr(decode, "of_rows", counted)
    monkeypatch.setattr(sampler, "FEWER", 2)
    drawn = policy.sample(problems, 2, until="step", seed=3)
    assert lengths == [4]
    monkeypatch.setattr(sampler, "FEWER", 99)
    assert_same(drawn, policy.sample(problems, 2, until="step", seed=3))


def test_one_compilation_a_bucket(policy, chains):
    for text in ("d", "z" * 40):  # rows of one sample each, and rows of several after a prompt longer than samples
        policy.sample([Prefix(text), Prefix("b", (text,))], 3, until="end", seed=0)
    before = decode.decode_samples._cache_size(), decode.prefill._cache_size()
    for text in ("d", "a longer problem", "z" * 40):
        for until in ("step", "end"):
            for seed in (0, 9):
                policy.sample([Prefix(text), Prefix("b", (text,))], 3 + seed % 2, until=until, seed=seed)
    assert (decode.decode_samples._cache_size(), decode.prefill._cache_size()) == before
    policy.sample([Prefix("z" * 70), Prefix("b")], N, until="step", seed=0)  # the next size of prompt
    rooms = 2  # for up to 32 tokens, and for up to 40
    after = before[0] + rooms, before[1] + 1
    assert (decode.decode_samples._cache_size(), decode.prefill._cache_size()) == after


def test_a_step_ends_where_its_delimiter_does():
    table = decode.progress_table(Letters(), "\n\n", 64)
    space, a, line, two = 2, Letters().encode("a")[0], 0, 3

    def ends(*ids):
        progress = 0
        for count, token in enumerate(ids, start=1):
            progress = table[token, progress]
            if progress < 0:
                return count
        return None

    assert ends(a, line, line) == 3 and ends(a, two) == 2 and ends(a, line, two) == 3
    assert ends(a, line, a, line) is None and ends(a, space, line, space, line) is None
    assert ends(line, line, two, space, a, line, line) == 7  # what is blank before is no step
    assert ends(two, two, two) is None
    assert table.shape == (64, 4) and table.min() == -1


def test_the_progress_table_is_that_of_letter_by_letter():
    """Tokens without a letter of the delimiter, most of all, are not read letter by letter."""
    texts = ["", "a", " ", "\t ", "ab c", "\n", "a\n", "\n\n", " \n a", "\r\n", "\u00a0", "\u2003x"]
    tokenizer = types.SimpleNamespace(decode=lambda ids: texts[ids[0]], vocab_size=len(texts))
    for delimiter in ("\n", "\n\n", "\n# "):
        size = len(delimiter)
        expected = [[decode._advance(text, p % size, p >= size, delimiter) for p in range(2 * size)] for text in texts]
        np.testing.assert_array_equal(decode.progress_table(tokenizer, delimiter, len(texts)), expected)


def test_templates_have_control_tokens_and_problems_have_none():
    layout = prompt_layout(Letters(), "ask <end>{problem}\n", "\n\n")
    assert layout.problem("abc")[4:] == [1, *Letters().encode("abc\n")]
    with pytest.raises(ValueError, match="'<'"):  # these letters have no "<": it is read as text
        dataclasses.replace(layout, tokenizer=Strict()).problem("<end>")
    assert layout.step("ab", 3) == Letters().encode("ab\n\n")
    with pytest.raises(ValueError, match="{problem}"):
        prompt_layout(Letters(), "Solve:", "\n\n")


class Strict(Letters):
    def encode(self, text):
        for letter in text:
            if letter not in self.pieces:
                raise ValueError(f"{letter!r} is not in the vocabulary")
        return super().encode(text)


def test_a_reward_model_is_no_policy(tiny_run):
    refused(ValueError, "'binary'", load_policy, tiny_run.folder)


def test_names_tell_distributions_apart(policy):
    names = {policy.name, make(temperature=0.5).name, make(temperature=1.0, top_p=0.5).name}
    assert len(names) == 3 and all(name.startswith("letters#") for name in names)
    assert make(temperature=1.0).name == policy.name


@pytest.fixture(scope="module")
def language_run(tmp_path_factory):
    """A run's folder as training leaves it, of a policy: its experiment, tokenizer and a checkpoint."""
    folder = tmp_path_factory.mktemp("policy")
    save_tokenizer(folder / "tokenizer.json")
    model = dataclasses.replace(MODEL, vocab_size=256, tied_embeddings=False)
    record = to_json(experiment(make_data(folder / "data"), model=model))
    (folder / "experiment.json").write_text(json.dumps(record))
    with store.open_checkpoints(folder, 1) as checkpoints:
        checkpoints.save_checkpointables(7, {"params": jax.tree.map(jax.numpy.asarray, params(model))})
    return folder, model


def test_a_policy_is_no_reward_model(language_run):
    with pytest.raises(ValueError, match="'language'"):  # its logits are of tokens, not of right and wrong
        jprm.load(language_run[0])


def test_a_policy_goes_on_with_the_head_of_the_policy_that_it_starts_from(language_run, tiny_run):
    folder, model = language_run
    begun = dataclasses.replace(experiment(folder / "data", model=model, base=str(folder)), objective="next_token")
    reward = dataclasses.replace(tiny_run.experiment.model, head="language", tied_embeddings=False)
    with one_device(), jax.set_mesh(make_mesh(begun.mesh)):
        head = initial_state(begun).params["head"]
        np.testing.assert_array_equal(head["kernel"], params(model)["head"]["kernel"])
        with pytest.raises(ValueError, match="tied_embeddings"):
            initial_state(dataclasses.replace(begun, model=reward, base=str(tiny_run.folder)))


def test_a_run_is_a_policy(language_run, tmp_path, monkeypatch):
    folder, model = language_run
    monkeypatch.setattr(sampler, "make_mesh", lambda config, devices=None: make_mesh(config, jax.devices()[:1]))
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"model": str(folder), "temperature": 0.0, "max_tokens": 8}))
    policy = load_policy(file)
    assert policy.name.startswith(f"{folder}@7#") and load_policy(file).name == policy.name
    with monkeypatch.context() as patch:  # another model under the same path and step
        restored = store.load_params
        patch.setattr(store, "load_params", lambda *args: (jax.tree.map(lambda x: x * 1.5, restored(*args)[0]), 7))
        assert load_policy(file).name.split("#")[0] == policy.name.split("#")[0]
        assert load_policy(file).name != policy.name
    ((sample,),) = policy.sample([Prefix("p")], 1, until="end", seed=0)
    tokenizer = load_tokenizer(folder)
    ids, prompt = [], policy.layout.problem("p")
    for _ in range(8):
        row = np.array([prompt + ids + [0] * (16 - len(prompt + ids))], np.int32)
        x_BTD, _ = jax.jit(decode.forward, static_argnums=1)(params(model), model, row, np.arange(16)[None])
        logit_V = head_logits(params(model), model, x_BTD[0, len(prompt + ids) - 1][None])[0]
        ids.append(int(np.argmax(logit_V)))
    steps = [step.strip() for step in tokenizer.decode(ids).split("\n") if step.strip()]
    assert (list(sample.steps), sample.tokens, sample.finish_reason) == (steps, 8, "length")
