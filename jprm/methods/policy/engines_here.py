"""Engines of `jprm rl` in this process, with no server between: vLLM, and sglang-jax. Each needs its package.

vLLM samples with the devices that it finds, takes parameters from arrays, and drops its cache of keys at every push.

sglang-jax, newer than its release 0.0.2, is SGLang's scheduler over jax, with this process's devices. Every push writes
the parameters into the engine's folder, from which the model reads them as at its start. Every sample's prompt is
computed anew. It takes all devices of a run for one model, so a run of several processes cannot use it.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jprm.methods.export.writing import decoder_tensors, head_tensor
from jprm.model.config import ModelConfig

Sampled = tuple[list[int], list[float], bool]
"""Ids, their log-probabilities, and whether the end of text was sampled."""


class VLLM:
    """The model in a folder, as `jprm.methods.export.writing.causal_lm` writes it."""

    def __init__(self, folder: pathlib.Path, positions: int, dtype: str, rows: int):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its engine is another process
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise FileNotFoundError(f"engine.kind='vllm_here': vllm is not installed here ({error})") from error
        self._llm = self._vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, max_model_len=positions, max_num_seqs=rows, dtype=dtype,
            generation_config="vllm", enable_prefix_caching=True, enforce_eager=True, disable_log_stats=True,
        )  # fmt: skip

    def load(self, params: Mapping[str, Any], config: ModelConfig) -> None:
        """Exchanges the parameters, one after the other, and drops what was computed with the old ones."""
        torch: Any = importlib.import_module("torch")  # vLLM's

        def tensors() -> Iterator[tuple[str, Any]]:
            for name, _, get in (*decoder_tensors(params["decoder"], config), head_tensor(params, config)):
                yield name, torch.from_numpy(np.ascontiguousarray(get(), np.float32))

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        self._llm.reset_prefix_cache()

    def draw(self, jobs: Sequence[tuple[Sequence[int], int]], most: int, eos: int | None) -> list[Sampled]:
        """Returns a sample after each prompt with its seed, at temperature 1 over all tokens."""
        ends = [] if eos is None else [eos]
        same = dict(
            temperature=1.0, max_tokens=most, logprobs=0, stop_token_ids=ends, ignore_eos=True, detokenize=False
        )
        some = [self._vllm.SamplingParams(seed=seed, **same) for _, seed in jobs]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in jobs]
        sampled = []
        for output in self._llm.generate(prompts, some, use_tqdm=False):
            (one,) = output.outputs
            ids = list(one.token_ids)
            logprobs = [by_id[token].logprob for by_id, token in zip(one.logprobs, ids, strict=True)]
            sampled.append((ids, logprobs, one.finish_reason == "stop"))
        return sampled

    def force(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probability of every id but the first, of each sequence."""
        one = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": list(ids)} for ids in sequences], one, use_tqdm=False)
        return [
            [by_id[token].logprob for by_id, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, sequences, strict=True)
        ]


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
