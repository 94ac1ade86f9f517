"""Evidence about chains from many sources, and the verifier that weighs it."""
