"""Serves a GGUF file by llama.cpp's own HTTP server, in float32, until it is killed.

python serve.py FILE PORT SLOTS
"""

import signal
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.n_parallel = int(sys.argv[3])
params.n_ctx = 2048 * params.n_parallel
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
signal.pause()
