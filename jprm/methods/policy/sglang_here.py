"""sglang-jax in this process as an engine of `jprm rl`: SGLang's scheduler over jax, with this process's devices.

Needs the package `sglang-jax`, newer than its release 0.0.2. Every push writes the parameters into the engine's folder,
from which the model reads them as at its start. Every sample's prompt is computed anew.

sglang-jax takes all devices of a run for one model, so a run of several processes cannot use it.
"""

from __future__ import annotations

import importlib
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import jax

from jprm.methods.policy.vllm_here import Sampled

HANDLED = signal.SIGCHLD, signal.SIGQUIT
"""Signals for which sglang-jax sets handlers: one takes the exit statuses of all child processes, one kills them."""


class SGLang:
    """The model in a folder, as `jprm.methods.export.writing.causal_lm` writes it."""

    def __init__(self, folder: pathlib.Path, positions: int, dtype: str, rows: int):
        if jax.process_count() > 1:
            raise ValueError("engine.kind='sglang_jax_here' works in a run of one process; use servers, kind='sglang'")
        try:
            engine: Any = importlib.import_module("sgl_jax.srt.entrypoints.engine")
        except ImportError as error:
            raise FileNotFoundError(f"engine.kind='sglang_jax_here': it cannot be imported here ({error})") from error
        before = {number: signal.getsignal(number) for number in HANDLED}
        # With its cache of prefixes, log-probabilities of prompts that are forced together may be wrong. Its scheduler
        # loses count of requests with log-probabilities where it prepares a batch while another one runs.
        self._engine = engine.Engine(
            model_path=str(folder), skip_tokenizer_init=True, context_length=positions, max_running_requests=rows,
            max_total_tokens=rows * positions, dtype=dtype, device=jax.default_backend(), disable_precompile=True,
            enable_single_process=True, enable_deterministic_sampling=True, disable_radix_cache=True,
            disable_overlap_schedule=True,
        )  # fmt: skip
        for number, handler in before.items():
            signal.signal(number, handler)

    def load(self) -> None:
        """Reads the parameters from the folder again."""
        nnx: Any = importlib.import_module("flax.nnx")
        runner = self._engine.scheduler_info["scheduler"].tp_worker.worker.model_runner
        runner.model.load_weights(runner.model_config)
        runner.model_state_leaves = jax.tree.leaves(nnx.split(runner.model)[1])

    def draw(self, jobs: Sequence[tuple[Sequence[int], int]], most: int, eos: int | None) -> list[Sampled]:
        """Returns a sample after each prompt with its seed, at temperature 1 over all tokens."""
        same: dict[str, Any] = dict(temperature=1.0, max_new_tokens=most, ignore_eos=eos is None)
        if eos is not None:
            same["stop_token_ids"] = [eos]
        some = [{**same, "sampling_seed": seed} for _, seed in jobs]
        sampled = []
        for reply in self._generate([list(prompt) for prompt, _ in jobs], some, -1):
            meta = reply["meta_info"]
            logprobs, ids = zip(*((float(one[0]), int(one[1])) for one in meta["output_token_logprobs"]), strict=True)
            sampled.append((list(ids), list(logprobs), ids[-1] == eos or meta["finish_reason"]["type"] == "stop"))
        return sampled

    def force(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probability of every id but the first, of each sequence."""
        one = dict(temperature=1.0, max_new_tokens=1, ignore_eos=True)
        replies = self._generate([list(ids) for ids in sequences], [one] * len(sequences), 0)
        return [[float(one[0]) for one in reply["meta_info"]["input_token_logprobs"][1:]] for reply in replies]

    def _generate(self, prompts: list[list[int]], params: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
        """Returns the replies, with the log-probabilities of the prompt from token `first` on, -1 for none."""
        return self._engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=first
        )
