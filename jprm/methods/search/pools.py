"""Pools of samples from a policy, from file to file, for `jprm sample`.

Problems are sampled a block at a time. A problem is saved as soon as its samples have ended, if the policy reports them
(`took`), else with its block: the same command continues with the remaining problems. A policy whose samples depend
only on their number gives the same bytes; with a model in this process the last bits depend on the other samples in the
batch.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jprm.io.jsonl import Rejects, dump, read_lines
from jprm.io.outputs import (
    Bar,
    atomic_file,
    check_output,
    check_own,
    check_unchanged,
    continued,
    cut,
    in_words,
    input_of,
)
from jprm.io.storage import Growing, path_of
from jprm.methods.answers import equivalent, extract
from jprm.methods.policy.protocol import Policy, Prefix, Problem, Sample, read_problems
from jprm.methods.policy.sample_cache import PolicyError
from jprm.tree import as_written

Path = str | os.PathLike


def sample_file(
    policy: Policy, input: Path, output: Path, n: int, *, seed: int = 0, at_once: int = 32, on_error: str = "stop"
) -> dict[str, int]:
    """Writes a pool (`pool`) with n samples for every problem in a file; returns counts, including earlier calls.

    The counts are `problems`, `samples` (including empty, but not failed ones), `correct`, `cut` (off), `tokens`
    (generated, of samples with steps), and `unjudged`, `empty`, `failed` if above 0. Sample j, from 0, has number `seed
    + j`. `at_once` problems are sampled together. Waits for the policy, with a progress bar. Finished pools go to
    `OUTPUT.part`, locked, beside `OUTPUT.info.json`; `output` appears once complete. The same call continues; if
    `output` is complete, it only counts.

    Raises:
      RecordError: a bad line, for on_error='stop'. With 'skip' it goes to `OUTPUT.rejects`.
      FileNotFoundError: `input` is absent.
      ValueError: n or at_once is below 1, the input is empty or damaged, or `on_error` is unknown.
      ValueError: `output`, or its part, belongs to another request or running process; no file is touched.
      PolicyError: all samples in a block failed; the same call continues once the policy answers.
    """
    if n < 1 or at_once < 1:
        raise ValueError(f"n is {n} and at_once {at_once}: both must be 1 or more")
    output = path_of(output)
    check_output(output, input)
    request = {"policy": policy.name, "n": n, "seed": seed, "at_once": at_once, "by_token": _by_token(policy)}
    request |= input_of(input)
    with continued(output, request) as part, Rejects(output.with_name(output.name + ".rejects")) as rejects:
        if part is not None:
            problems = [problem for _, problem in read_problems(input, on_error, rejects)]
            check_unchanged(request, "Run again when nothing writes it")
            kept = _Kept(part)
            left = [i for i in range(len(problems)) if i not in kept.places]
            note, total = "waiting for the first samples", n * len(problems)
            with Bar(f"samples of {output.name}", total, total - n * len(left), note) as bar:
                seen = _Seen(bar, n * len(left) * _most_tokens(policy))
                for block in (left[i : i + at_once] for i in range(0, len(left), at_once)):
                    _sample_block(policy, problems, block, n, seed, kept, seen)
            check_own(output, request)
            with atomic_file(output) as file:
                file.writelines(kept.lines())
            part.unlink()
    return _counts(output)


def _sample_block(
    policy: Policy, problems: Sequence[Problem], block: Sequence[int], n: int, seed: int, kept: _Kept, seen: _Seen
) -> None:
    """Samples some problems together, and saves each pool once its samples have ended.

    Raises PolicyError if all samples failed.
    """
    ended: dict[int, dict[int, Sample]] = {i: {} for i in block}
    seen.block()

    def keep(i: int, samples: Sequence[Sample]) -> None:
        kept.add(i, record := pool(problems[i], samples))
        seen.pool(record)

    def took(place: int, sample: Sample) -> None:
        i = block[place // n]
        ended[i][place % n] = sample
        seen.sample()
        if len(ended[i]) == n and any(ended_sample.finish_reason != "error" for ended_sample in ended[i].values()):
            keep(i, [ended[i][j] for j in range(n)])

    for name, told in (("took", took), ("watch", seen.within)):
        if hasattr(policy, name):
            setattr(policy, name, told)
    drawn = policy.sample([Prefix(problems[i].text) for i in block], n, until="end", seed=seed)
    errors = [sample.error for samples in drawn for sample in samples if sample.finish_reason == "error"]
    if len(errors) == sum(map(len, drawn)):
        way_on = "See that it answers, then run the same command: earlier problems are kept"
        raise PolicyError(f"policy {policy.name} failed at all {len(errors)} samples: {errors[-1]}. {way_on}")
    for i, samples in zip(block, drawn, strict=True):
        seen.sample(n - len(ended[i]))
        if i not in kept.places:
            keep(i, samples)


class _Kept:
    """An output's part: a line per pool, in order of completion."""

    def __init__(self, part: Growing):
        cut(part, 1)  # a kill may leave half a line
        part.seek(0)
        self.part, self.places = part, {}  # of each problem's line in the part: (first byte, whether it has its index)
        self.size = 0
        for number, line in enumerate(part):
            entry = json.loads(line)
            indexed = "samples" not in entry  # else of jprm 0.1, which wrote pools in order
            self.places[entry["index"] if indexed else number] = self.size, indexed
            self.size += len(line)

    def add(self, i: int, record: Mapping[str, Any]) -> None:
        line = dump({"index": i, "record": record}).encode() + b"\n"
        self.part.write(line)
        self.part.flush()
        self.places[i] = self.size, True
        self.size += len(line)

    def lines(self) -> Iterator[bytes]:
        """Yields the pools in the order of their problems."""
        for _, (at, indexed) in sorted(self.places.items()):
            self.part.seek(at)
            line = self.part.readline()
            yield dump(json.loads(line)["record"]).encode() + b"\n" if indexed else line


def _most_tokens(policy: Policy) -> int:
    """Returns the most tokens per sample, or 0 if unknown."""
    settings = getattr(policy, "options", None) or getattr(policy, "config", None)
    return getattr(settings, "max_tokens", 0) or 0


def pool(problem: Problem, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns a problem's pool record: `problem`, `samples`, `answer` if known, and the problem's other keys.

    Failed samples and ones without steps are only counted, in `failed_samples` and `empty_samples` (absent if 0). A
    sample has `steps`, `answer` (null if cut off or absent), `answer_rule` if there is an answer, `finish_reason` and
    `tokens`, and, if the policy reports them, `logprob`, `token_ids`, `token_logprobs`, `token_entropies`. It has
    `correct` if the problem has an `answer`; a cut-off one is incorrect.
    """
    correct: dict[str | None, bool] = {}  # answers repeat

    def written(sample: Sample) -> dict[str, Any]:
        answered = extract("\n".join(sample.steps)) if sample.finish_reason == "stop" else None
        answer = answered.answer if answered else None
        entry: dict[str, Any] = {"steps": list(sample.steps), "answer": answer}
        if answered and answer is not None:
            entry["answer_rule"] = answered.rule
        if problem.answer is not None:
            if answer not in correct:
                correct[answer] = equivalent(problem.answer, answer)
            entry["correct"] = correct[answer]
        entry |= {"finish_reason": sample.finish_reason, "tokens": sample.tokens}
        if sample.logprob is not None:
            entry["logprob"] = as_written(sample.logprob)
        by_token = {
            "token_ids": list(sample.token_ids),
            "token_logprobs": [as_written(logprob) for _, logprob in sample.token_logprobs],
            "token_entropies": [as_written(entropy) for entropy in sample.token_entropies],
        }
        return entry | {name: values for name, values in by_token.items() if values}

    kept = [sample for sample in samples if sample.steps]
    failed = sum(sample.finish_reason == "error" for sample in samples)
    record: dict[str, Any] = {"problem": problem.text, "samples": list(map(written, kept))}
    if problem.answer is not None:
        record["answer"] = problem.answer
    if empty := len(samples) - len(kept) - failed:
        record["empty_samples"] = empty  # evaluations count them as incorrect samples
    if failed:
        record["failed_samples"] = failed
    return record | {key: value for key, value in problem.extra.items() if key not in record}


def shares(counts: Mapping[str, Any]) -> str:
    """Returns e.g. "61.2% correct, 3.0% cut off" from counts of `sample_file`; without `correct` if `unjudged`.

    They are fractions of all samples, 0.0% if there are no samples. Raises KeyError if `samples`, `cut` or, unless
    `unjudged`, `correct` is absent.
    """
    samples = max(1, counts["samples"])
    parts = [] if counts.get("unjudged") else [f"{counts['correct'] / samples:.1%} correct"]
    return ", ".join([*parts, f"{counts['cut'] / samples:.1%} cut off"])


def _by_token(policy: Policy) -> dict[str, Any]:
    """Returns the policy's `logprobs` and `entropies` settings, which its name does not include."""
    settings = getattr(policy, "options", None) or getattr(policy, "config", None)
    return {name: getattr(settings, name) for name in ("logprobs", "entropies") if hasattr(settings, name)}


class _Seen:
    """The progress bar's text: tokens per second in this call, and shares of its samples."""

    def __init__(self, bar: Bar, most: int):
        self.bar, self.most, self.counts, self.begun = bar, most, collections.Counter(), time.monotonic()
        self.ended = self.before = 0  # samples of this call; tokens of its earlier blocks

    def block(self) -> None:
        self.before = self.counts["tokens"]

    def within(self, tokens: int, ended: int) -> None:
        self._tell(max(self.counts["tokens"], self.before + tokens))

    def sample(self, count: int = 1) -> None:
        self.ended += count
        self.bar.add(count)

    def pool(self, record: Mapping[str, Any]) -> None:
        self.counts.update(_counted(record))
        self._tell(self.counts["tokens"])

    def _tell(self, tokens: int) -> None:
        speed = tokens / (time.monotonic() - self.begun)
        known = f", {shares(self.counts)}" if self.counts["samples"] else ""
        if not self.ended and speed and self.most:
            known += f", at most {in_words((self.most - tokens) / speed)} in all"
        self.bar.add(0, f"{tokens:,} tokens, {speed:.1f} a second{known}")


def _counts(output: Path) -> dict[str, int]:
    counts = collections.Counter(problems=0, samples=0, correct=0, cut=0, tokens=0)
    for _, line in read_lines(output):
        counts.update(_counted(json.loads(line)))
    return dict(counts)


def _counted(record: Mapping[str, Any]) -> dict[str, int]:
    samples, empty = record["samples"], record.get("empty_samples", 0)
    counts = {
        "problems": 1,
        "samples": len(samples) + empty,
        "correct": sum(sample.get("correct", False) for sample in samples),
        "cut": sum(sample["finish_reason"] == "length" for sample in samples),
        "tokens": sum(sample["tokens"] for sample in samples),
        "unjudged": sum("correct" not in sample for sample in samples),
        "empty": empty,
        "failed": record.get("failed_samples", 0),
    }
    return {name: count for name, count in counts.items() if count or name in ("problems", "samples", "correct", "cut")}
