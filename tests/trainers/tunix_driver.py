# type: ignore  # its imports are in another environment
"""tunix's agentic GRPO learner on a tiny Qwen3, with turn rewards of a run of jprm in this process."""

import logging

import jax
import numpy as np
import optax
from flax import nnx
from run import loaded
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.environments import base_environment
from tunix.rl.rollout import base_rollout

import jprm

SIZES = dict(
    num_layers=2, vocab_size=128, embed_dim=16, hidden_dim=32, num_heads=2, head_dim=8, num_kv_heads=1,
    rope_theta=10000, norm_eps=1e-6, use_tied_embedding=True,
)  # fmt: skip
TURNS = 2


class Letters:
    """One token an ASCII character; every token is shown as a letter."""

    def encode(self, text, **_):
        return [ord(c) % 128 for c in text]

    def decode(self, ids, **_):
        return "".join(chr(97 + int(i) % 26) for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


class Template:
    """Messages with their roles."""

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return text + "<assistant>" * add_generation_prompt


class Asking(base_environment.BaseTaskEnv):
    """Says "Go on." once, and rewards nothing."""

    def __init__(self, single_example, **kwargs):
        super().__init__(task=single_example, **kwargs)

    def _initial_observation(self):
        return self.task

    def _step_impl(self, action):
        return base_environment.EnvStepResult("Go on.", 0.0, self.step_count == TURNS, {})


def main(adapter, folder, samples):
    logging.disable(logging.WARNING)
    episodes, rewards = [], []

    class Env(loaded(adapter).ScoredTurns, Asking):
        def close(self):
            episodes.append({"messages": self.messages[: 2 * TURNS], "scores": self.scores})

    actor = qwen3.Qwen3(qwen3.ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    reference = qwen3.Qwen3(qwen3.ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(actor, nnx.Param)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.sgd(1.0), eval_every_n_steps=100, max_steps=len(samples), mini_batch_size=1,
            train_micro_batch_size=1,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_prompt_length=128, max_tokens_to_generate=64, kv_cache_size=256, temperature=1.0, return_logprobs=True,
            eos_tokens=[2, *range(64, 128)],  # half of all: turns have two tokens on average
        ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(actor=actor, reference=reference, tokenizer=Letters(), cluster_config=config)
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster, chat_parser=Template(), env_class=Env,
        env_kwargs={"prm": jprm.load(folder), "max_steps": TURNS},
        algo_config=agentic_grpo_learner.GRPOConfig(num_generations=2, num_iterations=1, max_response_length=64),
    )  # fmt: skip
    compute = learner._compute_rewards

    def watched(*args, **kwargs):
        found = compute(*args, **kwargs)
        rewards.extend(np.asarray(found).tolist())
        return found

    learner._compute_rewards = watched
    learner.train([{"prompts": [sample["problem"]]} for sample in samples])
    after = nnx.to_pure_dict(nnx.state(cluster.actor_trainer.model, nnx.Param))
    moved = [float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    return {"episodes": episodes, "rewards": rewards, "moved": max(moved)}
