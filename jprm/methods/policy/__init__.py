"""Policies write steps. `protocol` defines them, `sampler` is one on this machine, `server` one over HTTP."""
