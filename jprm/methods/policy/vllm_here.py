"""vLLM in this process as an engine of `jprm rl`: parameters go from arrays to its own, and no server is between.

Needs the package `vllm`. It samples with the devices that vLLM finds; its caches of keys are dropped at every push.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
