"""A file in GGUF from its path to tokens."""

import json
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jpaged import LLM, SamplingParams, load
from jpaged.cli.main import main
from jpaged.config import EngineConfig
from jpaged.convert import convert, stored_dtype
from jpaged.demo import DIRECTORY
from jpaged.models.registry import read_config
from jpaged.runtime.parameters import by_name
from jpaged.start import resolve, setup
from jpaged.start.resolve import Device
from jpaged.start.setup import prepare
from jpaged.tokenizer import encode, load_tokenizer
from tests.support import gguf_models
from tests.support.few_shapes import few_shapes

TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return gguf_models.write_demo(tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def quantized_file(tmp_path_factory):
    return gguf_models.write_demo(tmp_path_factory.mktemp("demo") / "demo.gguf", Kind.Q8_0)


@pytest.mark.parametrize("kind, expected", [(Kind.BF16, "bfloat16"), (Kind.Q8_0, "float32"), (Kind.F32, "float32")])
def test_a_large_file_keeps_bfloat16(kind, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "device_of", lambda _: Device("a device", "cpu", bfloat16_weights=("bfloat16",)))
    monkeypatch.setattr(resolve, "CPU_CACHE_BYTES", 0)
    config = EngineConfig(model=str(gguf_models.write_demo(tmp_path / "demo.gguf", kind)))
    assert setup.resolve_checkpoint(config, jax.devices()[0])[1].dtype == expected


def test_the_demo_answers_alike_from_gguf(file, demo):
    """The demo is stored in bfloat16, which float32 holds."""
    with few_shapes():
        llm = LLM(
            file, progress=False, max_num_seqs=16, max_num_batched_tokens=32, max_model_len=512,
            num_gpu_blocks_override=512,
        )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12)
    (expected,), (found,) = (each.generate([TEXT], params) for each in (demo, llm))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].text == expected.outputs[0].text


def test_settings_name_the_kinds_of_the_file(quantized_file, capsys):
    setup = prepare(EngineConfig(model=str(quantized_file)))
    assert setup.resolved.weights == "gguf: Q8_0 1.7 MB, F32 0.0 MB"
    assert setup.resolved.quantization is None and setup.sampling_defaults == {}
    assert setup.tokenizer.chat_template == load_tokenizer(DIRECTORY).chat_template
    main(["doctor", "--model", str(quantized_file)])
    assert "quantization             gguf       Q8_0 1.7 MB" in capsys.readouterr().out


def test_the_files_own_method_may_be_named(quantized_file):
    assert prepare(EngineConfig(model=str(quantized_file), quantization="gguf")).resolved.quantization is None
    with pytest.raises(ValueError, match=r"quantization: the checkpoint is quantized by gguf, .* not 'awq'"):
        prepare(EngineConfig(model=str(quantized_file), quantization="awq"))
    with pytest.raises(ValueError, match=r"quantization: the checkpoint is not quantized, .* not 'gguf'"):
        prepare(EngineConfig(model="demo", quantization="gguf"))


def test_other_formats_of_loading_are_refused(file):
    with pytest.raises(ValueError, match="load_format: must be auto or dummy for a file in GGUF, not 'orbax'"):
        load(file, load_format="orbax", progress=False)


@pytest.mark.parametrize("name, dtype", [("F32", "float32"), ("F16", "float32"), ("Q8_0", "float32")])
def test_conversion_keeps_all_numbers(name, dtype, tmp_path):
    """Norms are float32 in every file."""
    file = gguf_models.write_demo(tmp_path / "demo.gguf", Kind[name])
    assert convert(str(file), tmp_path / "out", "safetensors") == stored_dtype(file) == dtype
    expected, found = (by_name(load(path, dtype="float32", progress=False)) for path in (file, tmp_path / "out"))
    for leaf, values in expected.items():
        np.testing.assert_array_equal(found[leaf], values, err_msg=leaf)
    tokenizer, original = load_tokenizer(tmp_path / "out"), load_tokenizer(DIRECTORY)
    assert encode(tokenizer, TEXT) == [original.bos_token_id, *encode(original, TEXT, add_special_tokens=False)]
    assert tokenizer.chat_template == original.chat_template and tokenizer.eos_token == original.eos_token
    assert read_config(tmp_path / "out").eos_token_ids == (original.eos_token_id,)


def test_conversion_to_another_dtype(quantized_file, tmp_path, capsys):
    main(["convert", str(quantized_file), str(tmp_path / "out"), "--to", "safetensors", "--dtype", "bfloat16"])
    assert capsys.readouterr().out == f"{quantized_file} -> {tmp_path / 'out'} (safetensors, bfloat16)\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored_dtype(tmp_path / "out") == "bfloat16"


def test_a_wrong_path_is_refused_before_jax_is_loaded():
    code = (
        "import sys\nfrom jpaged.cli.main import main\ntry: main(['serve', 'missing.gguf'])\n"
        "except SystemExit as end: print(end)\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [
        "jpaged serve: error: model: missing.gguf is not a directory or a file in GGUF", "False",
    ]  # fmt: skip


HOSTILE = {
    "llama.block_count": (10**6, "llama.block_count: is 1000000, and the file has 38 tensors"),
    "llama.attention.head_count": (0, "num_attention_heads"),
    "llama.attention.head_count_kv": (3, "num_attention_heads: must be a multiple of num_key_value_heads"),
    "llama.embedding_length": (161, "does not hold this model's tensors"),
    "llama.context_length": (0, "max_position_embeddings: must be at least 1"),
    "llama.feed_forward_length": (2**31, "intermediate_size: must be a whole number"),
    "llama.attention.key_length": (63, "value_length: must be the key length, not 64"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "rms_norm_eps: must be a finite number"),
    "llama.rope.freq_base": (-1.0, "rope_theta must be above 1"),
    "llama.rope.scaling.type": ("dynamic", "llama.rope.scaling.type: 'dynamic' is not supported"),
    "llama.rope.dimension_count": (63, "partial_rotary_factor"),
    "llama.expert_shared_count": (1, "llama.expert_shared_count: 1 is not supported"),
    "llama.attention.causal": (False, "llama.attention.causal: False is not supported"),
    "llama.attention.scale": (0.5, "attention_multiplier: 0.5 is not supported"),
    "llama.attn_logit_softcapping": (30.0, "attn_logit_softcapping: 30.0 is not supported"),
    "tokenizer.ggml.eos_token_id": (2000, "eos_token_id: must be a token, from 0 to 1279, not 2000"),
    "split.count": (3, "split.no: name the first part, as NAME-00001-of-00003.gguf"),
    "general.architecture": ("bert", "general.architecture: bert is not supported; supported: llama, mistral3, qwen2"),
}  # fmt: skip


@pytest.mark.parametrize("field", HOSTILE)
def test_hostile_metadata_is_refused_with_the_file(field, file, tmp_path):
    value, message = HOSTILE[field]

    def change(writer: gguf.GGUFWriter) -> None:
        kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
        writer.kv_data[0][field] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType[kinds[type(value)]])

    path = gguf_models.write_demo(tmp_path / "model.gguf", more=change)
    with pytest.raises(ValueError, match=f"{tmp_path}/model.gguf.*{message}"):
        load(path, progress=False)
        prepare(EngineConfig(model=str(path)))


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.9.attn_q.weight", np.zeros((2, 32), np.float32))

    path = gguf_models.write_demo(tmp_path / "model.gguf", more=add)
    with pytest.raises(ValueError, match=r"model\.gguf does not hold .*unexpected blk\.9\.attn_q\.weight \[2, 32\]"):
        load(path, progress=False)
