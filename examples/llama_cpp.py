"""Serves a GGUF file on CPUs with llama.cpp's own server, which the package `xllamacpp` has as a wheel.

    pip install xllamacpp
    python examples/llama_cpp.py model.gguf

It answers as many requests at once as it has slots, each with a context of its own. A policy's file for it:

    {"url": "http://127.0.0.1:8080/v1", "model": "model", "template": "model.gguf", "prompt": "{problem}",
     "concurrency": 8, "request_timeout_s": 3600, "total_timeout_s": 14400, "max_tokens": 256}

A sample takes `max_tokens` times the slots over the server's tokens a second: allow several times that. Under shorter
limits (600 seconds by default) it is abandoned and requested again, and nothing ever arrives.
"""

import sys
import time

import xllamacpp

SLOTS, CONTEXT = 8, 1024

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], 8080
params.n_parallel, params.n_ctx = SLOTS, SLOTS * CONTEXT
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # one for each core that is free, and no more
server = xllamacpp.Server(params)
while True:
    time.sleep(60)
