"""A worker whose kernels fail as kernels do, each in one cell; see `benchmarks/suite/jobs.py`.

`FAKE_CELLS` in the environment chooses: "kernels" puts faulty kernels under the real checks, "quick" computes
nothing, sends rows for cells, and hangs in the last one.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.suite import worker


def raises_and_poisons(*args):
    """As after a CUDA fault: this call fails, and so does every later one."""
    import jax

    def fails(*args, **options):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    jax.jit = jax.device_put = jax.block_until_ready = fails
    fails()


def aborts(*args):
    os.abort()


def hangs(*args):
    time.sleep(1000)


def wrong(q, *args):
    return 0 * q, None


def checks_its_environment(pool, *args):
    from pallas_kernels import reference

    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    return reference.copy_blocks(pool, *args)


FAULTS = {
    "decode, 1 split": dict(paged_decode_attention=raises_and_poisons),
    "decode, 2 to 4 splits": dict(paged_decode_attention=aborts),
    "ragged, prompts": dict(ragged_paged_attention=hangs),
    "ragged, mixed": dict(ragged_paged_attention=wrong),
    "copy": dict(copy_blocks=checks_its_environment),
}


def faulty(kernels, op):
    return dataclasses.replace(kernels, implementation=kernels.implementation._replace(**FAULTS.get(op, {})))


def quick(options, send):
    if options["cell"]["op"] == "copy":
        send("say", f"pid {os.getpid()}")
        time.sleep(1000)
    send("row", options["row"] | {"status": "ok"})


if __name__ == "__main__":
    if os.environ["FAKE_CELLS"] == "quick":
        sys.modules["quick_cells"] = sys.modules["__main__"]
        worker.WORK.update(dict.fromkeys(worker.WORK, ("builtins", "print")) | {"cell": ("quick_cells", "quick")})
    elif sys.argv[2] == "cell":
        from benchmarks.kernels import implementations

        choose, op = implementations.choose, json.loads(sys.argv[3])["cell"]["op"]
        implementations.choose = lambda *args: faulty(choose(*args), op)
    worker.main(*sys.argv[1:])
