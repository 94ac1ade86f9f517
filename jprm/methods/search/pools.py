"""Pools of samples from a policy, from file to file, for `jprm sample`.

Problems are sampled a block at a time, and a block is written whole. The same command continues after the last whole
block with the same calls of the policy, so a policy whose samples depend only on their number gives the same bytes.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from jprm.io.jsonl import Rejects, dump, read_lines
from jprm.io.outputs import Bar, check_output, continued, cut, finish, input_of
from jprm.io.storage import path_of
from jprm.methods.answers import equivalent, extract
from jprm.methods.policy.protocol import Policy, Prefix, Problem, Sample, read_problems
from jprm.methods.policy.sample_cache import PolicyError
from jprm.tree import as_written

Path = str | os.PathLike


def sample_file(
    policy: Policy, input: Path, output: Path, n: int, *, seed: int = 0, at_once: int = 32, on_error: str = "stop"
) -> dict[str, int]:
    """Writes a pool of n samples for every problem of a file; returns counts, those of earlier calls included.

    Sample j has number `seed + j`. `at_once` problems are sampled together.

    Raises:
      RecordError: a bad line, for on_error='stop'. With 'skip' it goes to `OUTPUT.rejects`.
      ValueError: `output`, or its part, is of another request; nothing is touched.
      PolicyError: the policy gave no sample of a block; the same call continues once it does.
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
            part.seek(0)
            whole = sum(line.endswith(b"\n") for line in part) == len(problems)  # the last block may be short
            done = len(problems) if whole else cut(part, at_once)
            with Bar(f"sampling {output.name}", len(problems), done, "compiling") as bar:
                seen = _Seen(bar)
                if hasattr(policy, "watch"):
                    policy.watch = seen.within  # pyright: ignore[reportAttributeAccessIssue]
                left = iter(problems[done:])
                while block := list(islice(left, at_once)):
                    records = pools(policy, block, n, seed)
                    part.write("".join(f"{dump(record)}\n" for record in records).encode())
                    part.flush()
                    seen.block(records)
            finish(part, output, request)
    return _counts(output)


def pools(policy: Policy, problems: Sequence[Problem], n: int, seed: int) -> list[dict[str, Any]]:
    """Returns the records of some problems, whose samples are requested together.

    Raises PolicyError where all samples failed.
    """
    prefixes = [Prefix(problem.text) for problem in problems]
    drawn = policy.sample(prefixes, n, until="end", seed=seed)
    errors = [sample.error for samples in drawn for sample in samples if sample.finish_reason == "error"]
    if len(errors) == sum(map(len, drawn)):
        way_on = "Then run the same command: earlier problems are kept"
        raise PolicyError(f"policy {policy.name} failed at all {len(errors)} samples: {errors[-1]}. {way_on}")
    return [pool(problem, samples) for problem, samples in zip(problems, drawn, strict=True)]


def pool(problem: Problem, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns a problem's record, with its samples but those that failed or have no step, which are counted."""
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
    """Returns which fractions of the counted samples are correct and cut off, in words."""
    samples = max(1, counts["samples"])
    parts = [] if counts.get("unjudged") else [f"{counts['correct'] / samples:.1%} correct"]
    return ", ".join([*parts, f"{counts['cut'] / samples:.1%} cut off"])


def _by_token(policy: Policy) -> dict[str, Any]:
    """Returns what of a policy's settings decides which numbers of tokens a sample has: its name does not say."""
    settings = getattr(policy, "options", None) or getattr(policy, "config", None)
    return {name: getattr(settings, name) for name in ("logprobs", "entropies") if hasattr(settings, name)}


class _Seen:
    """What the progress bar says: tokens a second of this call, and shares of the samples in it."""

    def __init__(self, bar: Bar):
        self.bar, self.counts, self.begun = bar, collections.Counter(), time.monotonic()

    def within(self, tokens: int, ended: int) -> None:
        """Tells of a block that is being sampled."""
        self._tell(self.counts["tokens"] + tokens, self.counts["samples"] + ended)

    def block(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self.counts.update(_counted(record))
        self.bar.add(len(records))
        self._tell(self.counts["tokens"], self.counts["samples"])

    def _tell(self, tokens: int, samples: int) -> None:
        speed = tokens / (time.monotonic() - self.begun)
        known = f", {shares(self.counts)}" if self.counts["samples"] else ""
        self.bar.add(0, f"{samples} samples, {speed:.1f} tokens a second{known}")


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
