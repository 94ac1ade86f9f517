"""Kinds of layers beside attention and the dense MLP, which are in `jprm.model.layers`."""
