"""Identity of a runner's computations: the hash of arrays, and the settings that bits depend on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.config import EngineConfig, Limits
from jpaged.core.commands import Sleep, UpdateParams, WakeUp
from jpaged.core.plan import ParamsDeleted
from jpaged.models.quantized import quantize
from jpaged.runtime import runner as runner_module
from jpaged.runtime.identity import hash_arrays, versions
from tests.runtime.test_runner import LLAMA
from tests.support.random_model import random_model
from tests.support.runners import runner_of

ARRAYS = {
    "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.zeros((), jnp.int8),
    "d": jnp.ones((0, 2)), "e": jax.random.key(0), "f": jnp.ones(2, jnp.float8_e4m3fn),
}  # fmt: skip


def test_equal_arrays_have_one_hash():
    assert hash_arrays("m", ARRAYS) == hash_arrays("m", {name: jnp.array(array) for name, array in ARRAYS.items()})
    assert len(hash_arrays("m", {})) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"a": ARRAYS["a"].at[1, 2].set(np.nextafter(np.float32(5), np.float32(6)))}, {"a": ARRAYS["a"].reshape(3, 2)},
        {"a": ARRAYS["a"].view(jnp.int32)}, {"b": ARRAYS["b"].at[0].set(2)}, {"c": jnp.ones((), jnp.int8)},
        {"d": jnp.ones((2, 0))}, {"e": jax.random.key(1)}, {"g": jnp.ones(1)}, {"c": jnp.zeros(1, jnp.int8)},
    ],
)  # fmt: skip
def test_every_bit_shape_dtype_and_name_counts(changes):
    assert hash_arrays("m", ARRAYS | changes) != hash_arrays("m", ARRAYS)


def test_the_description_counts():
    assert hash_arrays("other", ARRAYS) != hash_arrays("m", ARRAYS)


def runner(model, **config):
    return runner_of(model, EngineConfig(num_gpu_blocks_override=8, **config), Limits(64, 2, 8, 8))


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA, "float32", 0)


def test_a_fingerprint_is_computed_once_after_each_update(model, monkeypatch):
    served, hashed = runner(model), []
    monkeypatch.setattr(runner_module, "hash_arrays", lambda *args: hashed.append(1) or hash_arrays(*args))
    first = served.fingerprint()
    assert first == served.fingerprint() and len(hashed) == 1
    served.control(UpdateParams(random_model(LLAMA, "float32", 1)))
    second = served.fingerprint()
    assert first != second == served.fingerprint() and len(hashed) == 2
    served.control(UpdateParams(random_model(LLAMA, "float32", 0)))
    assert served.fingerprint() == first


def test_other_variables_of_a_module_count():
    def fingerprint_with(value):
        model = random_model(LLAMA, "float32", 0)
        model.statistics = nnx.BatchStat(jnp.full(3, value))
        return runner(model).fingerprint()

    assert fingerprint_with(0.0) == fingerprint_with(0.0) != fingerprint_with(1.0)


def test_a_sleeping_runner_has_the_fingerprint_of_its_copy_or_none(model):
    served, first = runner(model), runner(model).fingerprint()
    served.control(Sleep(1))
    assert served.fingerprint() == first
    served.control(WakeUp(["weights"]))
    served.control(Sleep(2))
    assert served.fingerprint() is None
    served.control(UpdateParams(model))
    assert served.fingerprint() == first


def test_deleted_parameters_have_no_fingerprint():
    served = runner(random_model(LLAMA, "float32", 0))
    served.params[0].delete()
    with pytest.raises(ParamsDeleted, match="deleted, as by a train step"):
        served.fingerprint()


def test_numerics_name_what_bits_depend_on(model):
    found = runner(model).numerics
    told = {"model": "jpaged.models.llama.Llama", "dtype": "float32", "quantization": "none", "block_size": 8}
    told |= {"activation_dtype": "float32"}
    told |= {"kv_cache_dtype": "float32", "tensor_parallel_size": 1, "logprobs_mode": "raw_logprobs"}
    assert found == found | told | versions() and found.keys() - told.keys() - versions().keys() == {
        "device",
        "kernels",
        "products",
    }
    other = runner(quantize(model, "int8"), logprobs_mode="processed_logprobs", kernels="reference", dtype="bfloat16",
                   kv_cache_dtype="fp8").numerics  # fmt: skip
    changed = {name: value for name, value in other.items() if found[name] != value}
    assert changed.pop("device", "cpu") == "cpu"
    assert changed == changed | {
        "dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "float8_e4m3fn",
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    assert other["kernels"] == "reference"
