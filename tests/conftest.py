"""Shared by all tests: the CPU, no network, a compilation cache for the run, tiny models."""

import gc
import os
import signal
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the CUDA plugin is here to compile, not to run
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"  # for meshes; an engine takes one device by default
# A third of a run goes into optimizing code that runs once.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1")
# The GPU interpreter holds one of XLA's threads for every warpgroup that waits; with as few as a machine may have
# processors, none is left for those that are waited for.
os.environ.setdefault("NPROC", "16")
# numpy's products are small here, and OpenBLAS's other threads would spin between them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import Phase, settings

from tests.support import checkpoints, models
from tests.support.few_shapes import few_shapes
from tests.support.kernel_code import unoptimized

# A shell's background job starts with SIGINT ignored, and so do its children: nothing could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no failure; and one that runs unattended should fail the same way twice.
settings.register_profile("jpaged", deadline=None, derandomize="CI" in os.environ)
# A mutant is dead at the first failure; the smallest one would take many times as long to find.
settings.register_profile("mutation", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("jpaged")


def pytest_collection_finish():
    """Exclude all modules from garbage collection, which otherwise takes a tenth of a run, and collect less often: at
    Python's thresholds the rest takes a twentieth."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Executables are shared within the run, by all its processes, and forgotten after it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


@pytest.fixture(scope="session", autouse=True)
def code_of_kernels():
    """Kernels run a few times on few numbers, as XLA's code does; some tests of tests/kernels optimize them."""
    with unoptimized():
        yield


@pytest.fixture(autouse=True)
def traced_anew(request):
    """Clear jax's caches before each test under mutmut, which selects the tests of a function by the calls of it: a
    function that an earlier test has traced is not called again."""
    if "MUTANT_UNDER_TEST" in os.environ and "jax" in sys.modules and not request.node.get_closest_marker("warm"):
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="session")
def demo():
    """The demo model with the limits of `benchmarks.shared.server_process.SMALL`, as servers of tests have them."""
    from jpaged import LLM

    with few_shapes():
        return LLM(
            progress=False, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=512, num_gpu_blocks_override=512
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A directory with a random two-layer Llama, a byte tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    checkpoints.write(directory, models.TINY, generation={"eos_token_id": models.EOS})
    models.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def loaded(tiny):
    """The engine of `tiny` that tests of servers share."""
    from tests.serving.client import build

    return build(tiny)
