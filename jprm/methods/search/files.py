"""Searches from file to file, for `jprm search`.

Until `OUTPUT` is whole, three files are beside it: `OUTPUT.part` with a line for every finished problem,
`OUTPUT.samples` with everything that the policy wrote, and `OUTPUT.info.json` with the request. The same command
therefore continues: it searches no finished problem and pays for no sample twice.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

from jprm.io.digests import digest
from jprm.io.jsonl import Rejects, count, dump, parse, read_lines, reject_with
from jprm.io.outputs import atomic_file, check_own, check_unchanged, continued, input_of
from jprm.io.progress import Bar
from jprm.io.storage import path_of
from jprm.methods.judge.critiques import KEY
from jprm.methods.policy.protocol import Policy
from jprm.methods.policy.sample_cache import KeptPolicy
from jprm.methods.search.growing_tree import Problem
from jprm.methods.search.live_scorer import LiveScorer
from jprm.methods.search.lockstep import SearchConfig, search
from jprm.methods.search.result import record
from jprm.tree import RecordError, tree_of

Path = str | os.PathLike

_CHAINS = ("steps", "samples", "nodes", "labels", "scores", "completions", "semantics", "search")


def read_problems(
    path: Path, on_error: str = "stop", rejects: Rejects | None = None
) -> Iterator[tuple[bytes, Problem]]:
    """Yields (line, problem) for a file of records with `problem` and, where known, `answer`.

    Other keys are kept, except those of chains.

    Raises:
      RecordError: for on_error='stop'. With 'skip' the line goes to `rejects`.
      ValueError: a file without a line.
    """
    reject = reject_with(on_error, rejects)
    count(path)  # not empty
    for number, line in read_lines(path):
        where = f"{os.fspath(path)}:{number}"
        try:
            given = parse(line, where)
            if not isinstance(given, Mapping):
                raise RecordError(where, "record", "is no object", 'Write {"problem": ..., "answer": ...} a line.')
            known = {"problem": given.get("problem"), "answer": given.get("answer"), "steps": ["-"]}
            tree = tree_of(known, where)
            if isinstance(given.get("system"), str) and given["system"].strip():
                reason = "is a system message, and a policy's prompt is set by its own file"
                raise RecordError(where, "system", reason, "Write it into the policy's `prompt`, and remove it here.")
        except RecordError as error:
            reject(line, error)
        else:
            extra = {key: value for key, value in given.items() if key not in (*known, *_CHAINS)}
            yield line, Problem(tree.problem, tree.answer, extra)


def search_file(
    policy: Policy,
    scorer: LiveScorer,
    scored_by: Mapping[str, Any],
    input: Path,
    output: Path,
    config: SearchConfig,
    *,
    on_error: str = "stop",
) -> dict[str, int]:
    """Searches the problems of a file and returns counts; `prm_tokens` and `judge_tokens` omit what a kill lost.

    `scored_by` identifies the scorer in the results. A problem without a single sampled step has no record: its line
    goes, byte for byte, to `OUTPUT.rejects`, as do bad lines with on_error='skip'.

    Raises:
      ValueError: `output`, or its part, is of another request; nothing is touched.
      PolicyError: the policy gives nothing; the same call continues once it does.
    """
    output = path_of(output)
    samples = output.with_name(output.name + ".samples")
    method, settings = type(config.method).__name__, dataclasses.asdict(cast(Any, config.method))
    about = {"method": method, **settings, "budget": config.budget, "seed": config.seed}
    request = {"policy": policy.name, "scorer": dict(scored_by), **input_of(input), **about, "rule": config.rule,
               "choose": config.choose, "digests": {"method": digest(config.method)}}  # fmt: skip
    with continued(output, request, samples) as part:
        if part is None:
            return _counts(output)
        with Rejects(output.with_name(output.name + ".rejects")) as rejects:
            problems = list(read_problems(input, on_error, rejects))
            check_unchanged(request, "Run again when nothing writes it")
            with KeptPolicy(policy, samples) as kept, Bar(f"searching {output.name}", len(problems)) as bar:
                done = _read_part(part)
                bar.add(len(done))
                left = [i for i in range(len(problems)) if i not in done]
                tokens = scorer.tokens
                about = {"method": method, **about, "policy": policy.name, "scorer": dict(scored_by)}
                for i, tree in search((problems[i][1] for i in left), kept, scorer, config):
                    found = record(tree, config.rule, config.choose, config.method.kind, about)
                    line = {"index": left[i], "record": found, "prm_tokens": scorer.tokens - tokens}
                    if found is None:
                        line["reason"] = f"the policy wrote no step: {tree.error or 'every chain is empty'}"
                    tokens = scorer.tokens
                    part.write(dump(line).encode() + b"\n")
                    part.flush()
                    done[left[i]] = line
                    bar.add()
            for i in sorted(done):
                if done[i]["record"] is None:
                    error = RecordError(f"{os.fspath(input)}: problem {i + 1}", "problem", done[i]["reason"], "")
                    rejects.add(problems[i][0], error)
        check_own(output, request)
        with atomic_file(output) as file:  # named after the rejects: a whole output ends the next call
            found = (done[i]["record"] for i in sorted(done))
            file.writelines(dump(record).encode() + b"\n" for record in found if record is not None)
        part.unlink()
        samples.discard()
    tokens = {} if "judge" in scored_by else {"prm_tokens": sum(line["prm_tokens"] for line in done.values())}
    return _counts(output) | tokens | {"rejected": rejects.count}


def _read_part(file) -> dict[int, dict[str, Any]]:
    """Returns the finished problems by index, and cuts off an unfinished last line, which a kill leaves."""
    file.seek(0)
    done, whole = {}, 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        found = json.loads(line)
        done[found["index"]] = found
        whole += len(line)
    file.truncate(whole)
    return done


def _counts(output: Path) -> dict[str, int]:
    counts = collections.Counter(problems=0, chosen=0, correct=0, policy_tokens=0, over_budget_tokens=0)
    for _, line in read_lines(output):
        record = json.loads(line)
        found = record["search"]
        counts["problems"] += 1
        counts["chosen"] += found["chosen"] is not None
        counts["correct"] += found["correct"] is True
        for name in ("policy_tokens", "over_budget_tokens"):
            counts[name] += found[name]
        if KEY in record:
            counts["judge_tokens"] += record[KEY]["tokens"]
    return dict(counts)
