"""Step layers: modules between the decoder and the head, which change the hidden states at step ends.

`ModelConfig.steps` names a Linen module with one field, `config`. It is called with states x_BSD (B, S, D), in the
computation's dtype, and with the slot of the step before each, parent_BS (B, S), which is -1 at a first step. It
returns states of the same shape. Its parameters are `params["steps"]`: they start as it says, train with the head, and
stay float32.

A step's state may depend on the steps before it on its own chain and on nothing else. Slots hold whole trees in
training, one chain in a live search, and padding, whose parent is -1.
"""

from __future__ import annotations

import flax.linen as nn

from jprm import registry


def find(name: str) -> type[nn.Module]:
    """Returns the module that `model.steps` names, `module:NAME`. Raises ValueError where there is none."""
    found = registry.find(name, {}, "model.steps", type)
    if not issubclass(found, nn.Module):
        raise ValueError(f"model.steps={name!r} is {found.__name__}, not a flax.linen.Module")
    return found
