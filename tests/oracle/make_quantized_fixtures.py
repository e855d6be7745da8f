"""Writes tests/fixtures/quantized.npz: layers that compressed-tensors has packed, and the weights that it reads back.

Needs torch, which the project itself never does:

    python3.11 -m venv /tmp/oracle && /tmp/oracle/bin/pip install torch==2.13.0 transformers compressed-tensors numpy
    /tmp/oracle/bin/python tests/oracle/make_quantized_fixtures.py

The weight of "fp8-block" is read back by transformers' Fp8Dequantize. Numbers of 8-bit floats are stored as bytes.
"""

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

FIXTURE = Path(__file__).parents[1] / "fixtures" / "quantized.npz"
OUT, IN, GROUP, BLOCK = 48, 64, 16, (16, 32)
GROUPS = (OUT, IN // GROUP)
CASES = {
    "packed-4": ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=GROUP), GROUPS),
    "packed-4-asymmetric": (
        "pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        GROUPS,
    ),
    "packed-8": ("pack-quantized", dict(num_bits=8, type="int", strategy="channel"), (OUT, 1)),
    "int-channel": ("int-quantized", dict(num_bits=8, type="int", strategy="channel"), (OUT, 1)),
    "float-channel": ("float-quantized", dict(num_bits=8, type="float", strategy="channel"), (OUT, 1)),
    "float-tensor": ("float-quantized", dict(num_bits=8, type="float", strategy="tensor"), (1,)),
}  # fmt: skip


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()


def main() -> None:
    torch.manual_seed(0)
    arrays = {}
    for name, (format, options, shape) in CASES.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))
        compressor = BaseCompressor.get_value_from_registry(format)
        largest = 2.0 ** (options["num_bits"] - 1) if options["type"] == "int" else 448.0
        state = {"weight": torch.randn(OUT, IN), "weight_scale": (1.5 + torch.rand(shape)) / largest}
        if not options.get("symmetric", True):
            state["weight_zero_point"] = torch.randint(-5, 6, shape).to(torch.int8)
        stored = compressor.compress(state, scheme)
        arrays |= {f"{name}/{key}": as_numpy(value) for key, value in stored.items()}
        arrays[f"{name}/expected"] = as_numpy(compressor.decompress(stored, scheme)["weight"].float())
    arrays |= fp8_block() | mxfp4()
    np.savez_compressed(FIXTURE, **arrays)
    print(*arrays, FIXTURE.stat().st_size, "bytes")


def mxfp4() -> dict[str, np.ndarray]:
    """Weights of two experts of gpt-oss, of any codes and of all exponents whose numbers float32 holds exactly."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shape = (2, OUT, IN // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(1, 252, shape, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    return {
        "mxfp4/blocks": blocks.numpy(), "mxfp4/scales": scales.numpy(), "mxfp4/expected": expected.float().numpy(),
    }  # fmt: skip


def fp8_block() -> dict[str, np.ndarray]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = (100 * torch.randn(OUT, IN)).to(torch.float8_e4m3fn)
    scale = 1e-3 * (1 + torch.rand(OUT // BLOCK[0], IN // BLOCK[1]))
    expected = Fp8Dequantize._dequantize_one(object.__new__(Fp8Dequantize), weight, scale, torch.float32)
    found = {"weight": weight, "weight_scale_inv": scale, "expected": expected}
    return {f"fp8-block/{key}": as_numpy(value) for key, value in found.items()}


if __name__ == "__main__":
    main()
