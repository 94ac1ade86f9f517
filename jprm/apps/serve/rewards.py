"""`POST /v1/rewards`: a score and a reward for each step of a trainer's samples, mapped to the trainer's token ids.

    {"credit": "min_form", "tokenizer": "Qwen3-4B", "samples": [
        {"problem": "What is 2 + 2?", "ids": [17, 488, 220, 17, 284, 220, 19, 13, 151645], "outcome": 1}]}

A sample is a prompt and a response. The prompt is `problem`, or `prompt` as formatted text, which the view parses. The
response is `response` as text, optionally with `offsets` of the client's tokens, or `ids` of a tokenizer loaded by the
server. `messages` hold prompt and response together; `ids` may be added.

Messages with several turns or tools are a trajectory, for models that support them. Each assistant turn is a step, or
several if `segmentation` is given; a span refers to its turn's content. Then `ids` must hold everything after the first
prompt, with a `mask` of 1 for tokens written by the policy; each run of 1 is a turn.

The token of a step is the one with its last character. If a token holds the end of one step and the start of the next,
it counts for both. Samples of one problem are merged, so equal ones and common prefixes are computed once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jprm.apps.serve.call import Call, finite, usage
from jprm.apps.serve.engine import Outputs, one_tree, problem_of
from jprm.apps.serve.openrlhf import View
from jprm.apps.serve.score import EXAMPLE, OF_MODEL, OF_RULE, Model, RuleName
from jprm.apps.web.http import Refusal, RequestFields, json_of, read_request
from jprm.methods.messages.free_text import exchange
from jprm.methods.messages.records import content_of, is_trajectory
from jprm.methods.rl.credit import CREDITS, CreditConfig, find, segment_rewards
from jprm.options import from_json
from jprm.score.aggregate import chain_scores
from jprm.score.scorer import PRM
from jprm.tokenizer import Tokenizer
from jprm.tree import ReasoningTree, as_written, tree_of

Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ScoredSample:
    """A parsed sample.

    Attributes:
      tree: its chain, unless the response is blank.
      text: the response.
      steps: the span of each stripped step in the text.
      tokens: the span of each of the client's T tokens in the text, if it sent tokens.
      outcome: the verifier's reward.
      turns: for a trajectory, the turn of each step, and its last token if the client sent tokens.
    """

    tree: ReasoningTree | None
    text: str
    steps: list[Span]
    tokens: list[Span] | None
    outcome: float | None
    turns: tuple[list[int], list[int] | None] | None = None

    @property
    def turn(self) -> list[int]:
        """The 0-based turn of each step; all 0 unless it is a trajectory."""
        return self.turns[0] if self.turns else [0] * len(self.steps)

    def places(self, where: str) -> list[int] | None:
        """Returns the index of each step's last token among the client's tokens; `None` if it sent no tokens.

        `where` begins errors, e.g. `samples[3]`. Raises Refusal (400) if no token covers a step's last character.
        """
        if self.tokens is None:
            return None
        if self.turns is not None:
            return self.turns[1]
        start_T, stop_T = np.array(self.tokens, np.int64).reshape(-1, 2).T
        full_K = np.flatnonzero(start_T < stop_T)  # the tokens that hold a character: they follow one another
        end_P = np.array([end for _, end in self.steps], np.int64)
        last_P = np.searchsorted(start_T[full_K], end_P) - 1  # the last one that begins before the end
        held_P = (last_P >= 0) & (stop_T[full_K][last_P] >= end_P) if len(full_K) else np.zeros(len(end_P), bool)
        if not held_P.all():
            j = int(np.argmin(held_P))
            raise Refusal(400, f"{where}: no token holds character {end_P[j] - 1}, where step {j} ends", "offsets")
        return full_K[last_P].tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsRequest(RequestFields):
    """Every step's span, token, score and reward, for a trainer's samples."""

    samples: Annotated[Sequence[dict], "Each with problem or prompt, and response, ids or messages; offsets, outcome."]
    credit: Annotated[str | dict, "What a step is rewarded for; absent, there are only scores."] = ""
    tokenizer: Annotated[str, "Of the ids: a name of --tokenizer."] = ""
    rule: RuleName = None
    model: Model = None

    closed = True
    example = {"credit": "min_form", "samples": [{"problem": EXAMPLE["problem"], "response": "2 + 2 = 4."}]}
    gives = {
        "samples": (Sequence[dict], "Of every sample its steps, its score, and with a credit its rewards."),
        "credit": (dict | None, "The credit with its options."),
        **OF_RULE,
        **OF_MODEL,
    }


async def rewards(request: Request) -> Response:
    """Answers `POST /v1/rewards`: `samples`, `credit`, `rule`, `model`, `usage`.

    A sample has `steps`, its `score` (null if blank), and `text` unless it is a trajectory. A step has `span` ([start,
    end) in the text), `turn`, `score`; with tokens `token`, with further outputs `outputs`, with a credit `reward`.
    With a credit, a sample also has `tail_reward`, and with tokens `token_rewards`. `credit` has the credit's name and
    options, or is null.

    Raises Refusal: 400 for an invalid sample, credit or tokenizer, 404 for an unknown model, 413, 503 or 504 for too
    much work, and as `json_of`; RecordError for a malformed sample.
    """
    asked = read_request(RewardsRequest, await json_of(request))
    call, view, sent = Call(request, asked.model, asked.rule), request.app.state.view, asked.samples
    engine, config = call.engine, _credit(asked.credit, call.engine.prm)
    tokenizer = _tokenizer(call.server.tokenizers, asked.tokenizer)
    call.check_items(sent, "samples", "samples[{}]")
    if (ids := sum(_tokens(item) for item in sent)) > (most := TOKENS * call.config.items):
        raise Refusal(413, f"the samples have {ids:,} tokens, and {most:,} at most: send them in parts", "samples")
    call.admit()

    def read() -> tuple[list[ScoredSample], list[list[int] | None], list[ReasoningTree], list[Place], int]:
        samples = [_sample(item, view, tokenizer, f"samples[{i}]") for i, item in enumerate(sent)]
        if config is not None and config.gate:
            for i, sample in enumerate(samples):
                if sample.outcome is None:
                    raise Refusal(400, f"samples[{i}].outcome is absent, and credit.gate looks at it", "outcome")
        trees, chains = _one_tree_a_problem(samples)
        with call.naming("samples", lambda: [sample.tree for sample in samples]):
            tokens = call.tokens_of(trees, alone=of_messages(trees))
        places = [sample.places(f"samples[{i}]") for i, sample in enumerate(samples)]
        return samples, places, trees, chains, tokens

    samples, places, trees, chains, tokens = await call.worked(read, len(sent))
    outputs = await call.answer(engine.score(trees, tokens, alone=of_messages(trees)))

    def response() -> Response:
        none = {name: np.zeros(0, np.float32) for name in engine.prm.output_names}
        rewards = [
            none if tree < 0 else {name: value_N[node_P] for name, value_N in outputs[tree].items()}
            for tree, node_P in chains
        ]
        paid = (
            [None] * len(samples) if config is None else _paid(samples, [reward["score"] for reward in rewards], config)
        )
        content = {
            "object": "rewards",
            "model": engine.name,
            "rule": call.rule,
            "credit": None if config is None else {name: getattr(config, name) for name in ("name", *OPTIONS)},
            "samples": [
                _written(sample, outputs_P, at, reward_P1, config, call.rule, engine.prm)
                for sample, outputs_P, at, reward_P1 in zip(samples, rewards, places, paid, strict=True)
            ],
            "usage": usage(tokens),
        }
        return JSONResponse(content)

    try:
        return await call.worked(response, len(sent))
    except ValueError as error:
        raise Refusal(400, str(error)) from None


# ---- What a request asks for.

TOKENS = 64
"""The most client tokens of a request, as a multiple of its item limit."""


def _tokens(sent: Any) -> int:
    """Returns the number of client tokens in a sample, as sent."""
    lists = [sent.get(key) for key in ("ids", "offsets")] if isinstance(sent, dict) else []
    return sum(len(items) for items in lists if isinstance(items, list))


OPTIONS = ("weight", "temperature", "gamma", "offset", "gate")
"""Credit fields that affect rewards. The other fields of `CreditConfig` concern advantages, the trainer's part."""


def _credit(sent: str | dict[str, Any], prm: PRM) -> CreditConfig | None:
    """Returns the credit that the request names, if any.

    Only names in `CREDITS` are accepted: a client must not make the server import a file.
    """
    if not sent:
        return None
    settings = {"name": sent} if isinstance(sent, str) else sent
    names = [name for name, credit in CREDITS.items() if credit.whole is None]  # the others pay no segment by itself
    if settings.get("name") not in names:
        raise Refusal(400, f"credit.name is {settings.get('name')!r}: use {', '.join(names)}", "credit")
    if unknown := sorted(settings.keys() - {"name", *OPTIONS}):
        raise Refusal(400, f"credit.{unknown[0]} is not known: options are {', '.join(OPTIONS)}", "credit")
    try:
        config = from_json(CreditConfig, {"advantage": "reinforce", "norm": "sequence"} | settings, "credit")
        config.check(prm.scale, prm.name)
        return config
    except ValueError as error:
        raise Refusal(400, str(error), "credit") from None


def _tokenizer(tokenizers: Mapping[str, Tokenizer], name: str) -> Tokenizer | None:
    """Returns the named tokenizer, the first for "", if the server has tokenizers."""
    if name and name not in tokenizers:
        remedy = f"use {', '.join(tokenizers)}" if tokenizers else "start the server with --tokenizer"
        raise Refusal(400, f"there is no tokenizer {name!r}: {remedy}", "tokenizer")
    return tokenizers[name] if name else next(iter(tokenizers.values()), None)


def _sample(sent: Any, view: View, tokenizer: Tokenizer | None, where: str) -> ScoredSample:
    if not isinstance(sent, dict):
        raise Refusal(400, f"{where} is no object", "samples")
    if extra := sent.keys() - KEYS:
        raise Refusal(400, f"{where}.{min(extra)} is not known: a sample has {', '.join(sorted(KEYS))}", "samples")
    outcome = sent.get("outcome")
    if outcome is not None and not (type(outcome) in (int, float) and np.isfinite(outcome)):
        raise Refusal(400, f"{where}.outcome is {outcome!r}, not a number", "outcome")
    if is_trajectory(sent) or "tools" in sent or "mask" in sent:
        return _trajectory(sent, tokenizer, outcome, where)
    prompt, text = _texts(sent, view, where)
    tokens = None
    if "ids" in sent:
        if text is not None and "offsets" in sent:
            raise Refusal(400, f"{where}: ids and offsets both tell the tokens. Send one of them", "ids")
        decoded, tokens = _decoded(sent["ids"], tokenizer, where)
        if text is not None and not decoded.strip() == text.strip():
            raise Refusal(400, f"{where}: ids decode to {decoded[:40]!r}, and the response is {text[:40]!r}", "ids")
        text = decoded
    elif "offsets" in sent:
        tokens = _offsets(sent["offsets"], len(sent.get("response", text) or ""), where)
    if text is None:
        raise Refusal(400, f"{where}: has no response. Send response, ids or messages", "samples")
    if not text.strip():
        return ScoredSample(None, text, [], tokens, outcome)
    record = prompt | {"response": text, "segmentation": sent.get("segmentation", "auto")}
    tree = tree_of(record, where)
    steps, at = [], 0
    for node in tree.nodes:  # steps without the white space around them, one after the other
        start = text.index(node.text, at)
        steps.append((start, at := start + len(node.text)))
    return ScoredSample(tree, text, steps, tokens, outcome)


KEYS = {"problem", "system", "prompt", "messages", "tools", "response", "ids", "mask", "offsets", "segmentation",
        "outcome"}  # fmt: skip


def _trajectory(
    sent: Mapping[str, Any], tokenizer: Tokenizer | None, outcome: float | None, where: str
) -> ScoredSample:
    """Parses a trajectory: its steps with their turns, and their last tokens in the client's ids."""
    if unused := sorted(sent.keys() - {"messages", "tools", "ids", "mask", "segmentation", "outcome"}):
        raise Refusal(400, f"{where}.{unused[0]} is not read beside the messages of a trajectory", unused[0])
    record = {"messages": sent.get("messages"), "tools": sent.get("tools"), "segment": sent.get("segmentation", "turn")}
    tree = tree_of({key: value for key, value in record.items() if value is not None}, where)
    contents = [content_of(message) for message in record["messages"] or () if message["role"] == "assistant"]
    turns, spans, turn, at = [], [], -1, 0
    for node in (tree.nodes[i] for i in tree.steps):
        turn, at = (turn, at) if node.continues else (turn + 1, 0)
        text = node.text.strip()
        start = contents[turn].index(text, at)
        spans.append((start, at := start + len(text)))
        turns.append(turn)
    if "ids" not in sent:
        return ScoredSample(tree, "", spans, None, outcome, (turns, None))
    ids, mask = sent["ids"], sent.get("mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(mask) != len(ids) or {*mask} - {0, 1}:
        raise Refusal(400, f"{where}.mask must have 1 for each id that the policy wrote, else 0", "mask")
    edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2).tolist()
    if len(edges) != len(contents):
        raise Refusal(400, f"{where}.mask has {len(edges)} runs of 1, and messages {len(contents)} turns", "mask")
    ends, written = [], [(begin, *_decoded(ids[begin:end], tokenizer, where)) for begin, end in edges]
    cursor = [0] * len(written)
    for turn, (start, end) in zip(turns, spans, strict=True):
        begin, text, tokens = written[turn]
        stop = len(text.rstrip())  # a turn that is one step ends with its text, calls included
        if turns.count(turn) > 1:
            step = contents[turn][start:end]
            if (place := text.find(step, cursor[turn])) < 0:
                raise Refusal(400, f"{where}: the ids of turn {turn} do not decode to {step[:40]!r}", "ids")
            cursor[turn] = stop = place + len(step)
        holding = [k for k, (a, b) in enumerate(tokens) if a < stop <= b]
        ends.append(begin + (holding[-1] if holding else len(tokens) - 1))
    return ScoredSample(tree, "", spans, [(0, 0)] * edges[-1][1], outcome, (turns, ends))


def _texts(sent: Mapping[str, Any], view: View, where: str) -> tuple[dict[str, Any], str | None]:
    """Returns problem and system message, and the response if it is given as text."""
    forms = [key for key in ("problem", "prompt", "messages") if key in sent]
    if len(forms) != 1:
        raise Refusal(400, f"{where}: send one of problem, prompt and messages", "samples")
    if "messages" in sent:
        texts = exchange(sent, where)
        system = {"system": texts["system"]} if "system" in texts else {}
        return {"problem": texts["user"], **system}, texts["assistant"]
    for key in ("problem", "prompt", "response"):
        if key in sent and not isinstance(sent[key], str):
            raise Refusal(400, f"{where}.{key} is of type {type(sent[key]).__name__}, not str", key)
    problem = sent["problem"] if "problem" in sent else view.problem(sent["prompt"], where)
    system = {"system": sent["system"]} if "system" in sent else {}
    response = sent.get("response")
    if response is not None and "prompt" in sent:
        response = view.response(response)
    return {"problem": problem, **system}, response


def _decoded(ids: Any, tokenizer: Tokenizer | None, where: str) -> tuple[str, list[Span]]:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Refusal(400, f"{where}.ids is no list of token ids", "ids")
    if tokenizer is None:
        raise Refusal(
            400, f"{where}.ids: this server has no tokenizer to decode them: start it with --tokenizer", "ids"
        )
    try:
        return text_spans(tokenizer, ids)
    except ValueError as error:
        raise Refusal(400, f"{where}.ids: {error}", "ids") from None


def _offsets(offsets: Any, length: int, where: str) -> list[Span]:
    """Validates character offsets as given by `tokenizers` and `return_offsets_mapping`."""
    pairs: list[Any] = offsets if isinstance(offsets, list) else [None]
    for k, pair in enumerate(pairs):
        good = isinstance(pair, list) and len(pair) == 2 and all(type(x) is int for x in pair)
        if not good or not 0 <= pair[0] <= pair[1] <= length:
            reason = f"is {pair!r}, not [start, end] with 0 <= start <= end <= {length}"
            raise Refusal(400, f"{where}.offsets[{k}] {reason}", "offsets")
    before = (0, 0)
    for k, (a, b) in enumerate(pairs):
        if a < b:  # a special token has no character, and [0, 0] anywhere
            if a < before[0] or b < before[1]:
                raise Refusal(400, f"{where}.offsets[{k}] begins or ends before the token before it", "offsets")
            before = (a, b)
    return [(a, b) for a, b in pairs]


# ---- What is computed.


def _one_tree_a_problem(samples: Sequence[ScoredSample]) -> tuple[list[ReasoningTree], list[Place]]:
    """Merges the samples of each problem into one tree; returns the trees, and each sample's place in them."""
    members: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        if sample.tree is not None:
            members.setdefault(problem_of(sample.tree) if sample.turns is None else i, []).append(i)
    trees: list[ReasoningTree] = []
    chains: list[Place] = [(-1, np.zeros(0, np.int64))] * len(samples)
    for in_tree in members.values():
        own_trees = [tree for i in in_tree if (tree := samples[i].tree) is not None]
        if own_trees[0].of_messages:  # its chat template reads a whole path
            tree, node_N = own_trees[0], np.array(own_trees[0].steps, np.int64)
        else:
            tree, node_N = one_tree(own_trees)
        ends = np.cumsum([len(samples[i].steps) for i in in_tree])
        for i, node_P in zip(in_tree, np.split(node_N, ends[:-1]), strict=True):
            chains[i] = len(trees), node_P
        trees.append(tree)
    return trees, chains


def of_messages(trees: Sequence[ReasoningTree]) -> bool:
    """Whether any tree is a trajectory; these are packed without merging."""
    return any(tree.of_messages for tree in trees)


Place = tuple[int, np.ndarray]
"""The tree that holds a sample's chain (-1 if blank), and the node of each step, (P,)."""


def _paid(
    samples: Sequence[ScoredSample], scores: Sequence[np.ndarray], config: CreditConfig
) -> list[np.ndarray | None]:
    """Returns the rewards of each sample's P + 1 segments, or `None` if a score is missing.

    The samples of one problem form a group.
    """
    groups: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        tree = sample.tree
        if not np.isfinite(scores[i]).all():  # a judge left a step unscored, so its credit is unknown
            continue
        groups.setdefault(i if tree is None else problem_of(tree), []).append(i)
    paid: list[np.ndarray | None] = [None] * len(samples)
    for group in groups.values():
        outcome_G = np.array([samples[i].outcome or 0.0 for i in group])
        for i, reward_P1 in zip(group, segment_rewards(outcome_G, [scores[i] for i in group], config), strict=True):
            reward_P1 = config.weight * reward_P1
            if find(config.name).verifier:
                reward_P1[-1] += samples[i].outcome or 0.0
            paid[i] = reward_P1
    return paid


def _written(
    sample: ScoredSample, outputs_P: Outputs, places: list[int] | None, reward_P1: np.ndarray | None,
    config: CreditConfig | None, rule: str, prm: PRM,
) -> dict[str, Any]:  # fmt: skip
    score_P, steps = outputs_P["score"], []
    for j, span in enumerate(sample.steps):
        step: dict[str, Any] = {"span": list(span), "turn": sample.turn[j], "score": _known(score_P[j])}
        if places is not None:
            step["token"] = places[j]
        if named := {name: _known(value_P[j]) for name, value_P in outputs_P.items() if name != "score"}:
            step["outputs"] = named
        if reward_P1 is not None:
            step["reward"] = float(reward_P1[j])
        steps.append(step)
    value = finite(chain_scores([score_P.tolist()], rule, prm.scale)[0][0]) if len(score_P) else None
    written: dict[str, Any] = {"steps": steps, "score": value}
    if sample.turns is None:
        written["text"] = sample.text
    if reward_P1 is not None:
        written["tail_reward"] = float(reward_P1[-1])
        if places is not None and sample.tokens is not None:
            reward_T = np.zeros(len(sample.tokens))
            np.add.at(reward_T, places, reward_P1[:-1])
            if len(reward_T):
                reward_T[-1] += reward_P1[-1]
            written["token_rewards"] = reward_T.tolist()
    return written


def _known(score: float) -> float | None:
    return as_written(score) if np.isfinite(score) else None


# ---- The text of token ids.

PENDING = 64
"""The most tokens that may wait for the end of a character, which has at most four bytes."""


def text_spans(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Decodes T ids without special tokens; returns the text, and the span of characters that each token completes.

    A span is (start, stop), half-open; there are T. They are consecutive and cover the text. If several tokens make up
    a character, it belongs to the last. The others, and special tokens, have an empty span.

    Raises ValueError if an id is outside the vocabulary, or more than `PREFIXES` ids have broken characters.
    """
    if ids and not 0 <= min(ids) <= max(ids) < max(tokenizer.vocab_size, 1 + max(tokenizer.special_ids, default=-1)):
        raise ValueError(f"token ids reach from {min(ids)} to {max(ids)}: they are of another tokenizer")
    kept = [i for i in ids if i not in tokenizer.special_ids]
    parts: list[str] = []  # the characters that each kept token completes
    begin = read = 0  # kept[begin:read] is context: some tokenizers drop the white space that a text begins with
    done = 0  # characters of the text of kept[begin:] that are in `parts`
    for at in range(len(kept)):
        now = tokenizer.decode(kept[begin : at + 1])
        certain = now.rstrip("\ufffd") if at + 1 < len(kept) and at - read < PENDING else now
        parts.append(certain[done:])
        done = max(done, len(certain))
        if certain == now:
            begin, read = read, at + 1
            done = len(tokenizer.decode(kept[begin:read]))
    text = tokenizer.decode(kept)
    if "".join(parts) != text:  # of a run of bytes with a broken one, Llama's decoder gives up all
        parts = _parts_of_prefixes(tokenizer, kept, text)
    spans, stop, rest = [], 0, iter(parts)
    for i in ids:
        start, stop = stop, stop + (0 if i in tokenizer.special_ids else len(next(rest)))
        spans.append((start, stop))
    return text, spans


def _parts_of_prefixes(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[str]:
    """Returns the characters that each token determines, by decoding every prefix of the ids."""
    if len(ids) > PREFIXES:
        raise ValueError(f"token ids: {len(ids):,} of them with broken characters, of {PREFIXES:,} at most")
    parts, stop = [], 0
    for at in range(len(ids)):
        certain = text if at + 1 == len(ids) else os.path.commonprefix([tokenizer.decode(ids[: at + 1]), text])
        parts.append(text[stop : max(stop, len(certain))])
        stop = max(stop, len(certain))
    return parts


PREFIXES = 4096
"""The most tokens that are decoded prefix by prefix, in quadratic time."""
