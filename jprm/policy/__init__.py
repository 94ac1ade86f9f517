"""Policies: what writes steps. `protocol` says what one is; `server` asks an OpenAI-compatible HTTP server."""
