"""Writes tests/fixtures/gguf.json: the files that llama.cpp's converter makes of the models of `support.gguf_cases`.

Of each file it has the fields of the architecture, and shapes and digests of the tensors in float32. Needs torch, and
the sources of llama.cpp, which the package llama-cpp-python 0.3.36 has in vendor/llama.cpp:

    python3.11 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers numpy ml_dtypes
    /tmp/oracle/bin/python tests/oracle/make_gguf_fixtures.py LLAMA_CPP
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "gguf.json"
MODEL_FIELDS = ("general", "tokenizer", "GGUF")  # beginnings of fields that are not the architecture's


def converted(hf: dict, folder: Path) -> Path:
    """The file of a model, without a vocabulary."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    from tests.oracle.make_architecture_fixtures import write
    from tests.support.architectures import tensor

    write(folder, hf, tensor)
    # Gemma 3's converter counts the tokens.
    words = {str(token): token for token in range(hf["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
    kind.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    kind.no_mtp = hf["model_type"].startswith("qwen3_5")  # these have no such layers
    kind(folder, gguf.LlamaFileType.ALL_F32, folder / "model.gguf", model_name="model").write()
    return folder / "model.gguf"


def described(path: Path) -> dict:
    """The fields and tensors of a file."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith(MODEL_FIELDS)
    }  # fmt: skip
    tensors = {
        tensor.name: [tensor.shape.tolist()[::-1], hashlib.sha256(tensor.data.tobytes()).hexdigest()[:12]]
        for tensor in reader.tensors
    }
    return {"fields": fields, "tensors": tensors}


def main() -> None:
    import torch

    sys.path[:0] = [str(ROOT), sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    from tests.support.gguf_cases import CASES

    found = {}
    for name, hf in CASES.items():
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            found[name] = described(converted(hf, Path(folder)))
    lines = [f'"{name}": {json.dumps(each, sort_keys=True)}' for name, each in sorted(found.items())]
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
