"""What identifies a model beside the scores that it gave: its folder and step, and a digest of its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jprm import registry
from jprm.io.digests import digest as digest_of
from jprm.model.config import ModelConfig
from jprm.score.scale import PROBABILITY
from jprm.score.scorer import PRM, Scorer
from jprm.tokenizer import Tokenizer, saved_bytes


def identity(prm: PRM | Scorer) -> dict[str, Any]:
    """Returns what a model's scores depend on, for the request of a file that holds them.

    A model that was replaced in its folder at the same step has another `digest`. `scale` is there for scores that are
    no probabilities, so that the file can be evaluated without the model.
    """
    if not isinstance(prm, PRM):
        return prm.identity
    params = [prm.params] if prm.ratio is None else [prm.params, prm.ratio.params]
    ratio = prm.ratio and {name: value for name, value in vars(prm.ratio).items() if name != "params"}
    digests = {
        "model": digest(params, prm.layout.tokenizer, prm.mesh),
        "config": digest_of(prm.config),
        "layout": digest_of(prm.layout),
        "head": digest_of([prm.readout, ratio, prm.semantics]),
    } | {f"model.{name}": digest_of(part) for name, part in own_parts(prm.config).items()}
    about = {"model": prm.name, "step": prm.step, "digests": digests}
    about |= {"dtype": prm.config.dtype, "attention": prm.config.attention}
    return about | ({} if prm.scale == PROBABILITY else {"scale": dataclasses.asdict(prm.scale)})


def own_parts(config: ModelConfig) -> dict[str, Any]:
    """Returns the user's own parts of a model, `module:NAME` in its config, by the config's field."""
    return {name: registry.find(getattr(config, name), {}, f"model.{name}") for name in own_modules(config)}


def own_modules(config: ModelConfig) -> dict[str, str]:
    """Returns the names of the modules of `own_parts`."""
    named = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value.rpartition(":")[0] for name, value in named.items() if isinstance(value, str) and ":" in value}


def digest(params: Any, tokenizer: Tokenizer, mesh: Mesh) -> str:
    """Returns 16 hexadecimal digits that differ between models whose parameters or tokenizers differ.

    Sums on the devices read every parameter once, and do not depend on the mesh.
    """
    found = hashlib.sha256()
    with jax.set_mesh(mesh):
        sums = [np.asarray(x).tolist() for x in jax.tree.leaves(_sums(params))]
    about = [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in jax.tree.leaves_with_path(params)]
    found.update(json.dumps([about, sums]).encode())
    found.update(saved_bytes(tokenizer))
    return found.hexdigest()[:16]


@jax.jit
def _sums(params: Any) -> Any:
    """Returns two sums of each array's bits modulo 2^32, one of scrambled bits: exact in any order of addition."""

    def of(x: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
        mixed = (bits ^ (bits >> 15)) * jnp.uint32(2654435761)
        return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)])

    return jax.tree.map(of, params)
