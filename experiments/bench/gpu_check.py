"""Exactness, block sizes and speed on an NVIDIA GPU, in at most ten minutes: `make gpu-check` installs what it needs.

    python experiments/bench/gpu_check.py [--minutes 10] [--json gpu_check.json] [--tiny]

The last line is PASS or FAIL: every implementation exact, and the kernel faster than `blocked`.

1. Every attention implementation against `reference`, with gradients: chains, subtrees and padding, windows and soft
   caps, float32 and bfloat16.
2. A sweep of the block sizes of `gpu_kernel`. The fastest of each case go to
   jprm/methods/kernels/gpu_blocks.json, which the code reads on this kind of GPU from then on.
3. Tokens a second of training and scoring with random weights: the shapes of SmolLM2-135M, all of it trained, and of
   Qwen2.5-7B with LoRA, beside `blocked` and transformers with its fastest attention.

The figures are one JSON object. What there is no time for is left out and named in it. `--tiny` runs all of it in a
minute with small shapes, on a CPU too, and writes no table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jprm import objectives
from jprm.experiment import DataConfig, Experiment, OptimizerConfig, TargetConfig
from jprm.methods.kernels import gpu as gpu_kernel
from jprm.methods.kernels.gpu import Launch, Launches
from jprm.model.attention import attend, check, plan
from jprm.model.config import ModelConfig
from jprm.model.heads import find
from jprm.model.mesh import MeshConfig, make_mesh, put_rows
from jprm.model.parameters import LoraConfig
from jprm.rows import Rows, empty_rows
from jprm.score.scorer import readout_of_rows
from jprm.train.state import initial_state, make_optimizer, make_step

FLOAT32, BFLOAT16 = 1e-5, 2**-7
"""Bounds. Of float32: the largest error over the largest value. Of bfloat16: the errors' root mean square over the
values'. (`blocked` also rounds scaled queries, which the kernel does not: its own bound is 2^-8.)"""

BASE: dict[str, Any] = dict(rope_theta=1e4, norm_eps=1e-6, dtype="bfloat16", remat="dots")
SMOLLM2 = ModelConfig(
    vocab_size=49_152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1536, **BASE
)  # fmt: skip
QWEN = ModelConfig(
    vocab_size=152_064, layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, mlp_width=18_944, qkv_bias=True,
    tied_embeddings=False, **BASE,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=64, **BASE
)  # fmt: skip


def made_rows(kind: str, T: int, count: int) -> Rows:
    """Returns `count` rows: `chain`, `tree` (a stem and four branches with two leaves each) or `padded` (a half)."""
    rows, index_T = empty_rows(count, T, T // 16), np.arange(T, dtype=np.int32)
    if kind == "tree":
        stem, branch = T // 4, 3 * T // 16
        at_T = index_T - stem
        leaf, end_T = branch // 3, stem + (at_T // branch + 1) * branch
        within_T = at_T % branch
        first_T, later_T = end_T - leaf, end_T
        until_T = np.where(within_T < leaf, end_T, np.where(within_T < 2 * leaf, first_T, later_T))
        depth_T = stem + np.where(within_T < 2 * leaf, within_T, within_T - leaf)
        rows.until[:], rows.position[:] = (
            np.where(index_T < stem, a, b) for a, b in ((T, until_T), (index_T, depth_T))
        )
    else:
        used = T if kind == "chain" else T // 2
        rows.until[:, :used], rows.position[:, :used] = used, index_T[:used]
    rows.tokens[:] = 1 + index_T % 50
    rows.step_end[:] = np.arange(15, T, 16)[: T // 16]
    rows.tree[:], rows.weight[:], rows.owned[:] = 0, 1, True
    return rows


def heads(model: ModelConfig, B: int, T: int) -> list[jax.Array]:
    K, G, H = model.kv_heads, model.group, model.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, K, G, H), (B, T, K, H), (B, T, K, H), (B, T, K, G, H)]
    return [jax.random.normal(key, shape, model.dtype) for key, shape in zip(keys, shapes, strict=True)]


def gradients(model: ModelConfig, rows: Rows, window: int | None = None) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function (q, k, v, dy) to attention's output and the gradients of q, k and v, compiled by jax."""

    def both(q, k, v, dy, until_BT, position_BT):
        seen = plan(until_BT, position_BT, model)
        y, back = jax.vjp(
            lambda *qkv: attend(*qkv, seen, model, None if window is None else jnp.int32(window)), q, k, v
        )
        return y, *back(dy)

    return functools.partial(jax.jit(both), until_BT=rows.until, position_BT=rows.position)


def exactness(model: ModelConfig, T: int, tiny: bool) -> list[dict]:
    """Returns the errors of every implementation that takes the case; `ok` where they are within the bounds."""
    checks = []
    plain, gemma = {}, dict(windows=(T // 4, 0), attention_softcap=20.0)
    cases = list(itertools.product(("chain", "tree", "padded"), (plain, gemma), ("float32", "bfloat16")))
    for kind, fields, dtype in [cases[1], cases[6]] if tiny else cases:
        rows, window = made_rows(kind, T, 2), T // 4 if fields else None
        case = dataclasses.replace(model, dtype=dtype, attention="reference", **fields)
        inputs, exact = exact_gradients(case, rows, window)
        for name in ("blocked", "gpu_kernel"):
            try:
                variant = dataclasses.replace(case, attention=name)
                check(name, variant, jax.default_backend())
            except ValueError as error:
                checks.append(dict(implementation=name, rows=kind, dtype=dtype, window=window, left_out=str(error)))
                continue
            errors = errors_of(variant, rows, window, inputs, exact)
            checks.append(dict(implementation=name, rows=kind, dtype=dtype, window=window) | errors)
    return checks


def exact_gradients(case: ModelConfig, rows: Rows, window: int | None) -> tuple[list[jax.Array], tuple]:
    """Returns random heads, and attention's output and gradients by the case's implementation in float32."""
    inputs = heads(case, *rows.until.shape)
    with jax.default_matmul_precision("highest"):  # a GPU's default for float32 is TF32
        exact = dataclasses.replace(case, dtype="float32")
        return inputs, gradients(exact, rows, window)(*(x.astype(jnp.float32) for x in inputs))


def errors_of(model: ModelConfig, rows: Rows, window: int | None, inputs, exact) -> dict[str, Any]:
    """Returns the errors of the output and the gradients of q, k and v; `ok` where they are within the bound."""
    with jax.default_matmul_precision("highest" if model.dtype == "float32" else "default"):
        results = gradients(model, rows, window)(*inputs)
    errors = [error_of(a, b, model.dtype) for a, b in zip(results, exact, strict=True)]
    return dict(errors=errors, ok=max(errors) < (FLOAT32 if model.dtype == "float32" else BFLOAT16))


def error_of(value: jax.Array, exact: jax.Array, dtype: str) -> float:
    error, exact = np.asarray(value, np.float64) - np.asarray(exact, np.float64), np.asarray(exact, np.float64)
    if dtype == "float32":
        return float(np.max(np.abs(error)) / np.max(np.abs(exact)))
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def seconds_of(call: Callable[[], Any], least: float = 0.2) -> float:
    """Returns the median time of a call, in seconds, over at least three calls and `least` seconds."""
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


SIDES = [(128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32), (32, 64), (32, 128)]
WARPS_STAGES = [(4, 2), (8, 2), (4, 3), (8, 3)]


def sweep(model: ModelConfig, rows: Rows, left: Callable[[], float], candidates: list[Launch]) -> dict:
    """Returns the fastest launches of a case and what was tried, each kernel's with the default ones of the others.

    A candidate that does not compile, or that takes more memory than a program has, counts as infinitely slow.
    """
    default = gpu_kernel.default_launches(gpu_kernel.padded_head(model.head_dim), jnp.dtype(model.dtype).itemsize)
    inputs, best, tried = heads(model, *rows.until.shape), default, []
    launches_of = gpu_kernel.launches

    def measured(launches: Launches) -> float:
        gpu_kernel.launches = lambda *_: launches
        try:
            call = gradients(model, rows)
            return seconds_of(lambda: call(*inputs))
        except (RuntimeError, ValueError) as error:
            print(f"  {launches}: {str(error).splitlines()[0][:100]}")
            return float("inf")
        finally:
            gpu_kernel.launches = launches_of

    fastest = measured(default)
    tried.append(dict(dataclasses.asdict(default), seconds=fastest))
    until_kernel = [left() * share for share in (2 / 3, 1 / 3, 0.0)]  # a third of the time for each
    for name, end in zip(("forward", "dq", "dkv"), until_kernel, strict=True):
        for candidate in candidates:
            if left() <= end:
                break
            launches = dataclasses.replace(best, **{name: candidate})
            if launches == best:
                continue
            seconds = measured(launches)
            tried.append(dict(dataclasses.asdict(launches), seconds=seconds))
            if seconds < fastest:
                best, fastest = launches, seconds
    return dict(best=dataclasses.asdict(best), seconds=fastest, default_seconds=tried[0]["seconds"], tried=len(tried))


def write_table(path: pathlib.Path, cases: dict[str, dict]) -> None:
    """Writes the winners into the table that the code reads; what it has of other GPUs and cases stays."""
    table = json.loads(path.read_text())
    of_device = table.setdefault(jax.local_devices()[0].device_kind, {})
    of_device |= {name: case["best"] for name, case in cases.items()}
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    gpu_kernel.tuned.cache_clear()


def experiment(model: ModelConfig, T: int, rows: int, lora: int) -> Experiment:
    return Experiment(
        name="gpu_check", tokenizer="none", model=model,
        data=DataConfig(("none",), "step", "error", tokens=T, slots=T // 16, rows=rows, micro_rows=rows),
        target=TargetConfig("correctness", neutral="none", after_error="keep"), objective="cross_entropy",
        optimizer=OptimizerConfig(learning_rate=1e-5), lora=LoraConfig(lora), steps=10,
    )  # fmt: skip


def speed(model: ModelConfig, kind: str, T: int, count: int, lora: int) -> dict[str, float]:
    """Returns tokens a second of scoring and of training, and the peak of the device's memory since it started."""
    config, mesh = experiment(model, T, count, lora), make_mesh(MeshConfig(), jax.local_devices()[:1])
    rows = made_rows(kind, T, count)
    tokens_per_s: dict[str, float] = {}
    with jax.set_mesh(mesh):
        state = initial_state(config, load_base=False)
        if not lora:
            batch, readout = put_rows(rows, mesh), find(model.head).readout
            tokens_per_s["scoring"] = rows.tokens.size / seconds_of(
                lambda: readout_of_rows(state.params, model, batch, readout), 1.0
            )
        step = make_step(objectives.find("cross_entropy", {}), make_optimizer(config.optimizer), config.task)
        stacked = put_rows(jax.tree.map(lambda x: x[None], rows), mesh, lead=1)
        state, metrics = step(state, stacked, jnp.float32(1e-5))
        jax.block_until_ready(metrics.loss)
        start, steps = time.perf_counter(), 0
        while steps < 3 or time.perf_counter() - start < 2:
            state, metrics = step(state, stacked, jnp.float32(1e-5))
            jax.block_until_ready(metrics.loss)
            steps += 1
        tokens_per_s["training"] = steps * rows.tokens.size / (time.perf_counter() - start)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return tokens_per_s | ({"peak_bytes": float(peak)} if peak else {})


def transformers_speed(model: ModelConfig, T: int, count: int) -> dict[str, Any]:
    """Returns tokens a second of transformers' model of the same shapes on chains, by its fastest attention here."""
    try:
        import torch
        from transformers import AutoModelForTokenClassification, Qwen2Config
    except ImportError as error:
        return {"left_out": f"{error.name} is not installed"}
    if not torch.cuda.is_available():
        return {"left_out": "torch finds no GPU"}
    shape = Qwen2Config(
        vocab_size=model.vocab_size, hidden_size=model.width, intermediate_size=model.mlp_width,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, num_labels=2,
    )  # fmt: skip
    ids = torch.randint(0, model.vocab_size, (count, T), device="cuda")
    for kind in ("flash_attention_2", "sdpa"):
        try:
            peer = AutoModelForTokenClassification.from_config(shape, attn_implementation=kind, dtype=torch.bfloat16)
            peer = peer.cuda()
            break
        except (ImportError, ValueError):
            continue

    def timed(call: Callable[[], Any], turns: int = 5) -> float:
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(turns):
            call()
        torch.cuda.synchronize()
        return turns * ids.numel() / (time.perf_counter() - start)

    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-5, fused=True)

    def train() -> None:
        peer(input_ids=ids, labels=ids % 2).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        scoring = timed(lambda: peer(input_ids=ids))
    return {"attention": kind, "scoring": scoring, "training": timed(train)}


def speeds(tiny: bool, left: Callable[[], float]) -> list[dict]:
    """Returns the speeds of every model, implementation and kind of row that there is time for."""
    T = 128 if tiny else 4096
    models = [("tiny", TINY, 2, 0)] if tiny else [("SmolLM2-135M", SMOLLM2, 4, 0), ("7B, LoRA", QWEN, 1, 16)]
    results: list[dict] = []
    for name, model, count, lora in models:
        for kind, attention in itertools.product(("chain", "tree"), ("gpu_kernel", "blocked")):
            if tiny and (kind, attention) != ("tree", "gpu_kernel"):
                continue
            case = dict(model=name, rows=kind, attention=attention, tokens=T, batch=count)
            if left() < 0:
                results.append(case | {"left_out": "no time left"})
                continue
            try:
                variant = dataclasses.replace(model, attention=attention)
                results.append(case | speed(variant, kind, T, count, lora))
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                results.append(case | {"left_out": str(error).splitlines()[0]})
            print(results[-1], flush=True)
        if not lora:
            results.append(
                dict(model=name, rows="chain", attention="transformers") | transformers_speed(model, T, count)
            )
            print(results[-1], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of it")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu_check.json"), help="file of the figures")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on a CPU too; no table is written")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" and not args.tiny:
        raise SystemExit("jax finds no GPU here: pip install -e '.[train,cuda]', or try --tiny on a CPU")
    start = time.monotonic()

    def until(minutes: float) -> Callable[[], float]:
        return lambda: start + 60 * minutes * args.minutes / 10 - time.monotonic()

    device = jax.local_devices()[0]
    of_heads = TINY if args.tiny else dataclasses.replace(SMOLLM2, head_dim=80)  # of no power of two
    exact = exactness(of_heads, 128 if args.tiny else 1024, args.tiny)
    print(f"{sum(x.get('ok', False) for x in exact)} of {sum('ok' in x for x in exact)} are exact", flush=True)
    cases, T = {}, 128 if args.tiny else 4096
    candidates = [Launch(*sides, *more) for sides, more in itertools.product(SIDES, WARPS_STAGES)]
    spent = (time.monotonic() - start) / (6 * args.minutes)  # in tenths of the time, as `until` counts
    for end, model in [(2.0, TINY)] if args.tiny else [(spent / 2 + 3.25, SMOLLM2), (6.5, QWEN)]:
        case = dataclasses.replace(model, attention="gpu_kernel")
        best = sweep(case, made_rows("tree", T, 1), until(end), candidates[-1:] if args.tiny else candidates)
        cases[gpu_kernel.key(model.head_dim, 2)] = best
        print(gpu_kernel.key(model.head_dim, 2), best, flush=True)
    if not args.tiny:
        write_table(pathlib.Path(gpu_kernel.__file__).parent / gpu_kernel.TUNED, cases)
    result = dict(
        device=device.device_kind, jax=jax.__version__, exactness=exact, sweep=cases,
        speed=speeds(args.tiny, until(9.5)),
        seconds=time.monotonic() - start,
    )  # fmt: skip
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{args.json}: written")
    lines, passed = verdict(result)
    print("\n".join(lines))
    if not passed:
        raise SystemExit(1)


def verdict(result: dict[str, Any]) -> tuple[list[str], bool]:
    """Returns what the figures say in a few lines, the last PASS or FAIL, and whether it is PASS."""
    wrong = [x for x in result["exactness"] if not x.get("ok", True)]
    lines = [f"not exact: {json.dumps(x)}" for x in wrong]
    slower = []
    for ours in (x for x in result["speed"] if x["attention"] == "gpu_kernel" and "training" in x):
        for other in result["speed"]:
            if other["attention"] == "gpu_kernel" or any(other.get(k) != ours.get(k) for k in ("model", "rows")):
                continue
            if "training" in other:
                ratio = ours["training"] / other["training"]
                lines.append(f"{ours['model']}, {ours['rows']}: gpu_kernel trains {ours['training']:,.0f} tokens/s,"
                             f" {ratio:.2f} x {other['attention']}")  # fmt: skip
                slower += [ours["model"]] if ratio < 1 and other["attention"] == "blocked" else []
    what = [f"{len(wrong)} cases are not exact"] * bool(wrong)
    what += [f"gpu_kernel is slower than blocked for {', '.join(sorted(set(slower)))}"] * bool(slower)
    lines.append(f"FAIL: {'; '.join(what)}" if what else "PASS: commit gpu_check.json and gpu_blocks.json")
    return lines, not what


if __name__ == "__main__":
    main()
