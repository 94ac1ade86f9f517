"""Plans a step for absent chips: compiles it, e.g. by libtpu on a laptop, and measures its minimum cost."""
