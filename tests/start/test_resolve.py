"""Settings that the model and the device decide."""

import dataclasses

import pytest

from jpaged.config import CPU, GPU, EngineConfig, Limits
from jpaged.models.config import ModelConfig
from jpaged.models.variation import RopeConfig
from jpaged.setting import settings
from jpaged.start.resolve import Device, Resolved, resolve

MODEL = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
)  # fmt: skip


def resolved_on(platform: str, model: ModelConfig, **values: object) -> Resolved:
    return resolve(EngineConfig(**values), model, Device("a device", platform))


@pytest.mark.parametrize(
    "platform, settings, expected",
    [
        ("cpu", {}, Limits(4096, 64, 256, 64)),
        ("cuda", {}, Limits(4096, 256, 2048, 16)),
        ("cpu", {"max_model_len": 2048}, Limits(2048, 64, 256, 64)),
        ("cpu", {"max_model_len": 2047}, Limits(2047, 64, 256, 16)),
        ("cpu", {"block_size": 16}, Limits(4096, 64, 256, 16)),
        ("cuda", {"block_size": 128}, Limits(4096, 256, 2048, 128)),
        ("cpu", {"max_num_seqs": 300}, Limits(4096, 300, 300, 64)),
        ("cpu", {"max_num_batched_tokens": 8}, Limits(4096, 8, 8, 64)),
        ("cuda", {"max_num_seqs": 2, "max_num_batched_tokens": 4096}, Limits(4096, 2, 4096, 16)),
    ],
)
def test_limits_by_device(platform, settings, expected):
    assert resolved_on(platform, MODEL, **settings).limits == expected


def test_limits_that_the_model_or_the_pool_does_not_allow():
    with pytest.raises(ValueError, match=r"max_model_len: 4097 exceeds the model's max_position_embeddings \(4096\)"):
        resolved_on("cpu", MODEL, max_model_len=4097)
    with pytest.raises(ValueError, match=r"max_num_seqs: 64 exceeds the 63 blocks of the KV pool"):
        resolved_on("cpu", MODEL, num_gpu_blocks_override=63)
    scaled = dataclasses.replace(MODEL, rope=RopeConfig("linear", factor=4.0, original_max_position_embeddings=4096))
    assert resolved_on("cpu", scaled).limits.max_model_len == 16384
    with pytest.raises(ValueError, match=r"max_model_len: 16385 .* as linear rope_scaling extends them \(16384\)"):
        resolved_on("cpu", scaled, max_model_len=16385)
    small = dataclasses.replace(MODEL, max_position_embeddings=1024)
    assert resolved_on("cpu", small).limits.block_size == 16


def test_rows_of_int8_are_for_one_cpu():
    assert choices(resolved_on("cpu", MODEL, activation_dtype="int8"))["activation_dtype"] == ("int8", "set")
    assert choices(resolved_on("cuda", MODEL))["activation_dtype"] == ("bfloat16", "that of dtype")
    for platform, more, told in (("cuda", {}, "1 of cuda"), ("cpu", {"tensor_parallel_size": 2}, "2 of cpu")):
        with pytest.raises(ValueError, match=rf"^activation_dtype: int8 is for one CPU device, not for {told}$"):
            resolved_on(platform, MODEL, activation_dtype="int8", **more)


def choices(resolved: Resolved) -> dict[str, tuple[object, str]]:
    return {setting: (value, reason) for setting, value, reason in resolved.choices}


def test_every_open_setting_has_a_value_and_a_reason():
    open_settings = {each.name for each, _ in settings(EngineConfig) if each.default in (None, "auto")}
    elsewhere = {
        "revision", "tokenizer", "load_format", "hf_overrides", "generation_config", "override_generation_config",
        "speculative_config", "lora_dtype", "lora_modules",
        "kernels", "num_gpu_blocks_override", "kv_cache_memory_bytes", "kv_cache_dir", "kv_events_config",
        "preemption_mode",
    }  # fmt: skip
    made = choices(resolved_on("gpu", MODEL))
    assert made.keys() == open_settings - elsewhere
    assert made["max_num_seqs"] == (256, "the default on a GPU") and made["dtype"][0] == "bfloat16"
    made = choices(resolved_on("cpu", MODEL, max_num_batched_tokens=8, dtype="half", kv_cache_dtype="fp8"))
    assert made["max_num_seqs"] == (8, "as many as max_num_batched_tokens")
    assert made["max_num_batched_tokens"] == (8, "set") and made["block_size"][0] == 64
    assert made["dtype"] == ("half", "set") and made["kv_cache_dtype"] == ("fp8", "set")


@pytest.mark.parametrize(
    "platform, dtype, stored, expected",
    [
        ("cpu", "auto", "bfloat16", "float32"), ("gpu", "auto", "bfloat16", "bfloat16"),
        ("gpu", "auto", "float32", "bfloat16"), ("gpu", "float", "float16", "float32"),
    ],
)  # fmt: skip
def test_dtype(platform, dtype, stored, expected):
    model = dataclasses.replace(MODEL, dtype=stored)
    assert resolved_on(platform, model, dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    "dtype, values, stored, expected",
    [
        ("bfloat16", {}, {}, "bfloat16"), ("float32", {}, {}, "float32"), ("float16", {}, {}, "float32"),
        ("bfloat16", {"dtype": "float32"}, {}, "float32"), ("bfloat16", {"tensor_parallel_size": 2}, {}, "float32"),
        ("bfloat16", {"quantization": "int8"}, {}, "bfloat16"), ("bfloat16", {"quantization": "int4"}, {}, "float32"),
        ("bfloat16", {}, {"stored_method": "awq", "stored_weights": None}, "float32"),
        ("bfloat16", {"quantization": "int8"}, {"stored_method": "awq", "stored_weights": None}, "bfloat16"),
        ("bfloat16", {}, {"stored_method": "compressed-tensors", "stored_weights": "int8"}, "bfloat16"),
        ("bfloat16", {"quantization": "compressed-tensors"},
         {"stored_method": "compressed-tensors", "stored_weights": "int8"}, "bfloat16"),
        ("bfloat16", {}, {"stored_method": "gguf", "stored_weights": "bfloat16"}, "bfloat16"),
        ("bfloat16", {}, {"stored_method": "gguf", "stored_weights": None}, "float32"),
    ],
)  # fmt: skip
def test_a_cpu_that_multiplies_bfloat16_faster_keeps_it(dtype, values, stored, expected):
    """Products on several devices and those of other weights run elsewhere."""
    model = dataclasses.replace(MODEL, dtype=dtype, hidden_size=2048, intermediate_size=4096)
    device = Device("a device", "cpu", bfloat16_weights=("bfloat16", "int8"))
    made = resolve(EngineConfig(**values), model, device, **stored)
    assert made.dtype == expected
    reasons = {"bfloat16": "faster here", "float32": "most exact"}
    assert values.get("dtype") or reasons[expected] in choices(made)["dtype"][1]


@pytest.mark.parametrize("layers, expected", [(7, "float32"), (8, "bfloat16")])
def test_a_model_that_fits_into_caches_is_float32(layers, expected):
    # 12 heads of 16 and 3 matrices of 1152 are 8.02 MiB of a layer in float32.
    sizes = dict(hidden_size=576, intermediate_size=1152, num_hidden_layers=layers)
    model = dataclasses.replace(MODEL, dtype="bfloat16", **sizes)
    assert (
        resolve(EngineConfig(), model, Device("a device", "cpu", bfloat16_weights=("bfloat16", "int8"))).dtype
        == expected
    )


@pytest.mark.parametrize(
    "setting, stored, expected", [(None, "awq", None), ("awq", "awq", None), ("int8", None, "int8")]
)
def test_quantization(setting, stored, expected):
    made = resolve(EngineConfig(quantization=setting), MODEL, Device("", "gpu"), stored_method=stored)
    assert made.quantization == expected
    with pytest.raises(ValueError, match=r"^quantization: the checkpoint is .*, not 'gptq'$"):
        resolve(EngineConfig(quantization="gptq"), MODEL, Device("", "gpu"), stored_method=stored)


def test_a_module_keeps_its_dtype_and_its_devices():
    made = resolve(EngineConfig(), MODEL, Device("", "cpu"), module_size=2)
    assert (made.dtype, made.mesh, made.model) == (None, (2, 1), MODEL)
    assert resolve(EngineConfig(tensor_parallel_size=1), MODEL, Device("", "cpu"), module_size=2).mesh == (1, 1)


def test_help_states_the_defaults():
    text = {each.name: setting.text for each, setting in settings(EngineConfig)}
    for defaults in (CPU, GPU):
        assert f"{defaults.max_num_seqs} on a" in text["max_num_seqs"]
        assert f"{defaults.max_num_batched_tokens:,} on a" in text["max_num_batched_tokens"]
        assert f"{defaults.max_chunk_cost:g}" in text["max_num_batched_tokens"]
