"""Runs the benchmarks of this folder and rewrites RESULTS.md with their results.

    make bench                                                  # or: python -m experiments.bench.results
    python -m experiments.bench.results train_speed attention   # some of them; the lines of the others stay

Options after `--` go to every benchmark: `-- --data FOLDER --no-peer`. The page is written from runs/bench, which holds
a JSON file of results for every benchmark.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

from experiments.bench import yardsticks

HERE = pathlib.Path(__file__).resolve().parent
KEPT = yardsticks.REPOSITORY / "runs" / "bench"
BENCHES = ("attention", "search_speed", "score_speed", "train_speed", "host_speed", "rl_speed")


def measure(bench: str, options: list[str]) -> bool:
    """Runs one benchmark, shows its output and stores its last line; returns whether it succeeded."""
    start, last = time.perf_counter(), ""
    command = [sys.executable, "-m", f"experiments.bench.{bench}", *options]
    print(f"$ {' '.join(command)}", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
    if run.returncode:
        return False
    result = json.loads(last) | {
        "took_seconds": time.perf_counter() - start,
        "when": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{cpu()}, {len(os.sched_getaffinity(0))} cores",
    }
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{bench}.json").write_text(json.dumps(result, indent=1) + "\n")
    return True


def cpu() -> str:
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.processor()


def number(x: float | None, digits: int = 3) -> str:
    """Returns a figure with so many digits, or as a whole number if it has more; a dash for None."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:.{digits}g}"


def table(head: str, rows: list[list[str]]) -> str:
    lines = [head, "|" + "---|" * head.count(" | ") + "---|", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def page(results: dict[str, dict]) -> str:
    parts = [
        "# Benchmarks\n\nWritten by `make bench`: all figures are measured, none is edited. A ratio is to the peer on"
        " the same machine in the same minutes; the limit is the fastest float32 product of two 3,072 x 3,072 matrices"
        " that jax or numpy made there before each round. Each script's `--help` says what it measures.\n"
    ]
    for bench, write in (("train_speed", training), ("score_speed", scoring), ("search_speed", searching),
                         ("attention", attending), ("host_speed", hosting),
                         ("rl_speed", reinforcing)):  # fmt: skip
        if bench in results:
            r = results[bench]
            parts.append(f"{write(r)}\n{r['machine']}; {r['when']}; {number(r['took_seconds'])} seconds in all.\n")
    return "\n".join(parts)


def speeds(r: dict, what: str, peer: str) -> str:
    share = f"{100 * r['limit_share']:.1f} % of {number(r['limit_flops_per_s'] / 1e9)} GFLOP/s"
    return table(
        f"| {what} | jprm | {peer} | ratio | jprm's model FLOP/s over the limit |",
        [[f"median of {r['rounds']}", number(r["ours"]), number(r["peer"]), number(r["ratio"]), share]],
    )


def training(r: dict) -> str:
    epoch = r["epoch"]
    return (
        "## Training\n\nSmolLM2-135M in float32, every parameter trained, PRM800K phase 1:"
        f" {epoch['rated_completions']:,} rated completions in {epoch['rows']} rows of {r['row_tokens']:,} tokens.\n\n"
        + speeds(r, "rated completions a second", "TRL")
        + f"\n{number(r['tokens_per_s'])} real tokens a second (TRL {number(r['peer_tokens_per_s'])}); a step of one"
        f" row takes {number(r['seconds'])} s, {100 * r['wait_share']:.2f} % of it waiting for data, of which the host"
        f" alone makes {number(epoch['host_rows_per_s'])} rows a second. remat `{r['remat']}`, attention"
        f" `{r['attention']}` in blocks of {r['attention_block']}, {number(r['temporary_bytes'] / 2**30)} GiB of"
        " temporaries.\n" + remats(r["remats"])
    )


def remats(cases: list[dict]) -> str:
    if not cases:
        return ""
    rows = [
        [f"`{x['remat']}`", number(x["temporary_bytes"] / 2**30), number(x["seconds"]), number(x["cpu_seconds"])]
        for x in cases
    ]
    head = "| remat | GiB of temporaries | seconds | processor seconds |"
    return f"\nWhat is kept for the backward pass, in a step of {cases[0]['layers']} layers:\n\n" + table(head, rows)


def scoring(r: dict) -> str:
    growth = [
        [str(g["samples"]), str(g["chains"]), f"{g['tokens']:,}", f"{g['cells']:,}", number(g["seconds"]),
         number(g["chains"] / g["seconds"])] for g in r["growth"]
    ]  # fmt: skip
    return (
        f"## Scoring a pool\n\nGSM8K, {r['problems']} problems of 19 chains, SmolLM2-135M in float32:"
        f" {r['chain_tokens']:,} tokens as chains, {r['tokens']:,} with prefixes merged, {r['cells']:,} with padding."
        "\n\n"
        + speeds(r, "chains a second", "transformers")
        + "\nWith N chains a problem:\n\n"
        + table("| N | chains | tokens | with padding | seconds | chains a second |", growth)
    )


def searching(r: dict) -> str:
    new = r["new_tokens"]
    ours = [number(r["ours"], 4), number(r["cells"] / new, 4), number(r["seconds"])]
    peer = [number(r["peer"], 4), number(r["peer_cells"] and r["peer_cells"] / new, 4), number(r["peer_seconds"])]
    grown = ", ".join(f"{g['chain_tokens']:,}" for g in r["growth"])
    return (
        f"## Beam search\n\n{r['beams']} beams, {r['steps']} steps, {new:,} new tokens. Speed-up"
        f" {number(r['speedup'])}.\n\n"
        + table(
            "| scorer | PRM tokens a new token | with padding | seconds |",
            [["jprm, live trees", *ours], ["transformers, whole chains in batches of 4", *peer]],
        )
        + f"\nTokens of the whole chains, round by round: {grown}; of live trees, only the round's own.\n"
    )


def attending(r: dict) -> str:
    rows = [
        [x["shape"], f"{x['T']:,}", f"`{x['way']}`", number(x["seconds"]), number(x["peak"]), number(x["peak_rss"]),
         f"{100 * x['needed']:.1f} %"] for x in r["rows"]
    ]  # fmt: skip
    return (
        "## Attention\n\nOne layer, forward and backward; `jax.nn` is `jax.nn.dot_product_attention` with a T x T mask."
        " Peak memory is over that of inputs and outputs: by the compiled program, and as resident memory.\n\n"
        + table("| row | T | way | seconds | peak | resident | computed pairs that were needed |", rows)
    )


def hosting(r: dict) -> str:
    return (
        "## Packing\n\nOne epoch of PRM800K phase 1, rows of 8,192 tokens, one thread; the rows are the same bit for"
        " bit.\n\n"
        + table(
            "| real tokens a second | from the cache | from records | ratio |",
            [[f"median of {r['rounds']}", number(r["ours"]), number(r["peer"]), number(r["ratio"])]],
        )
        + f"\nPacking alone, trees in memory: {number(r['packing'])} tokens a second. The cache took"
        f" {number(r['write_seconds'])} s to write and has {number(r['cache_bytes_a_token'])} bytes a token.\n"
    )


def reinforcing(r: dict) -> str:
    ours = [number(r["ours"]), number(r["sampled_tokens"], 4), number(r["cells"], 4)]
    peer = [number(r["peer"]), number(r["peer_sampled_tokens"], 4), number(r["peer_cells"], 4)]
    return (
        "## Reinforcement learning\n\nThe quickstart's policy, 16 problems x 16 samples an update, a verifier's reward,"
        f" one step of AdamW. Ratio {number(r['ratio'])}.\n\n"
        + table(
            "| | updates a second | tokens sampled an update | tokens computed in training, with padding |",
            [["jprm", *ours], [r["peer_name"] or "–", *peer]],
        )
    )


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)} (default: all)")
    argv = [*sys.argv[1:], "--"]
    cut = argv.index("--")
    benches, options = args.parse_args(argv[:cut]).benches or list(BENCHES), argv[cut + 1 : -1]
    if unknown := set(benches) - set(BENCHES):
        args.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(BENCHES)}")
    failed = [bench for bench in benches if not measure(bench, options)]
    kept = {bench: KEPT / f"{bench}.json" for bench in BENCHES}
    results = {bench: json.loads(file.read_text()) for bench, file in kept.items() if file.is_file()}
    (HERE / "RESULTS.md").write_text(page(results))
    print(f"{HERE / 'RESULTS.md'}: written" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
