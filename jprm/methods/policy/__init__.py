"""Policies write steps. `protocol` defines them; `openai_client` and `engine` are two over HTTP."""
