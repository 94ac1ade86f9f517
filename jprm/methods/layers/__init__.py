"""Further kinds of layers; attention and the dense MLP are in `jprm.model.layers`."""
