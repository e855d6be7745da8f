"""A write that does not rotate, a copy that hangs, a decode that takes its process with it. Ragged attention is right.

The copy starts a process of its own, as XLA starts ptxas, and writes its id to the file PLANTED_PID.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from pallas_kernels import reference
from tests.kernels.planted.good import delta_rule, ragged_paged_attention, unsupported

__all__ = ["copy_blocks", "delta_rule", "paged_decode_attention", "ragged_paged_attention", "unsupported", "write_kv"]


def write_kv(*args):
    *arrays, options = args
    k_pool, v_pool, _ = reference.write_kv(*arrays, dataclasses.replace(options, cos_t=None, sin_t=None, q_tnh=None))
    return k_pool, v_pool, options.q_tnh


def copy_blocks(pool, sources_c, destinations_c):
    child = subprocess.Popen(["sleep", "1000"])
    Path(os.environ["PLANTED_PID"]).write_text(str(child.pid))
    child.wait()


def paged_decode_attention(*args, tiles):
    print("CUDA_ERROR_ILLEGAL_ADDRESS, as the last words", file=sys.stderr, flush=True)
    os.abort()
