"""`jprm serve`: scores over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from jprm.apps.cli.arguments import Adapter, one_of
from jprm.apps.serve import ServeConfig, Weights
from jprm.model import Dtype

DEFAULTS = ServeConfig()


def serve(
    model: Annotated[Positional[tuple[Path, ...]], arg(metavar="DIR ...")] = (),
    config: OmitArgPrefixes[ServeConfig] = DEFAULTS,
    policy: Annotated[Path | None, arg(metavar="P", help_behavior_hint="")] = None,
    view: Annotated[Path | None, arg(metavar="VIEW.json", help_behavior_hint="")] = None,
    tokenizer: Annotated[tuple[Path, ...], arg(metavar="DIR ...", help_behavior_hint="")] = (),
    adapter: Adapter = None,
    dtype: Annotated[Dtype | None, one_of(Dtype)] = None,
    attention: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None,
    weights: Annotated[Weights, one_of(Weights)] = "copied",
    run: Annotated[tuple[Path, ...], arg(metavar="DIR ...", help_behavior_hint="")] = (),
) -> None:
    """Score over HTTP: /v1/score, /v1/rewards, /v1/rerank, /v1/continue, vLLM's /pooling, OpenRLHF's /get_reward.

    With the environment variable JPRM_API_KEY, clients send the key as `Authorization: Bearer KEY`. SIGTERM ends the
    server after it has answered what it admitted.

    For example:
      jprm serve runs/prm800k_smollm2
      jprm serve --run runs/prm800k_smollm2
      curl localhost:8000/v1/score -d '{"problem": "What is 2 + 2?", "response": "2 + 2 = 4. So it is 4."}'

    Args:
        model: Folders of trained or published models, also in a bucket. A request names a folder, or takes the first.
        policy: What writes next steps for /v1/continue: a model's folder, a GGUF file, or a policy's JSON file.
        view: How prompts of /get_reward and /v1/rewards are written: {"prompt": "...{problem}...", "ends": [...],
            "segmentation": "auto"}.
        tokenizer: Tokenizers of callers that send token ids to /v1/rewards: folders, or files tokenizer.json, .model or
            .gguf. A request names a folder or file, or takes the first.
        adapter: How to read a published model whose files do not show it: a name, or a JSON file.
        dtype: How the parameters are stored; int8 takes a quarter of float32's memory. Default: as trained.
        attention: The attention implementation, as in `jprm score`.
        weights: Whether every local device has a copy of the parameters and rows of its own, or a part of the
            parameters, for a model that is too large for one device.
        run: Runs of `jprm train` or `jprm rl`, or folders of runs, also in a bucket, whose curves the page /runs shows
            while they train. No model is needed for it.
    """
    from jprm.apps.serve.app import serve

    serve(
        model,
        config,
        view=view,
        policy=policy,
        tokenizers=tokenizer,
        adapter=adapter,
        dtype=dtype,
        attention=attention,
        weights=weights,
        runs=run,
    )
