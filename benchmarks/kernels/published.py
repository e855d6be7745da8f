"""Published figures of other engines at the shapes of the anchors, for the row of the same shape.

From the tables of measurements in github.com/ai-dynamo/aiconfigurator (bfloat16, head dim 128, 32 query heads on 8 KV
heads). Decode is given there in per cent of the device's nominal bandwidth; here it is GB/s.
"""

from collections.abc import Mapping
from typing import Any

SOURCE = "aiconfigurator"
NOMINAL_GB_PER_S = {"H100": 3350, "H200": 4800}
# (sequences, context): per cent of the nominal bandwidth.
DECODE: dict[str, dict[tuple[int, int], dict[str, int]]] = {
    "H100": {
        (32, 1024): {"SGLang FA3": 71, "vLLM FA3": 67, "TensorRT-LLM": 59},
        (32, 8192): {"SGLang FA3": 91, "vLLM FA3": 90, "TensorRT-LLM": 88},
        (1, 8192): {"SGLang FA3": 59, "vLLM FA3": 59, "TensorRT-LLM": 62},
        (1, 32768): {"SGLang FA3": 70, "vLLM FA3": 51, "TensorRT-LLM": 42},
    },
    "H200": {
        (32, 1024): {"SGLang FA3": 64, "vLLM FA3": 60},
        (32, 8192): {"SGLang FA3": 90, "vLLM FA3": 83},
        (1, 8192): {"SGLang FA3": 64, "vLLM FA3": 56},
        (1, 32768): {"SGLang FA3": 43, "vLLM FA3": 37},
    },
}
PREFILL_TFLOP_PER_S = {"H100": {4096: 520, 8192: 603, 16384: 664}}  # FA3, causal, one prompt
GEMM_GB_PER_S = {"H100": "2100-2500", "H200": "2800-3100"}  # 6144 x 4096, up to 128 rows
GEMM_TFLOP_PER_S = 800  # from 2,048 rows on


def published(row: Mapping[str, Any], device_kind: str) -> str | None:
    """Return the published figures for the shape of a row on a device, None if there are none."""
    device = next((name for name in NOMINAL_GB_PER_S if name in device_kind), None)
    if device is None or row.get("status") != "ok" or row.get("head_dim", 128) != 128:
        return None
    figures = None
    if row["experiment"] == "decode" and row["lengths"] == "uniform":
        shares = DECODE[device].get((row["batch"], row["context"]), {})
        rates = (f"{name} {NOMINAL_GB_PER_S[device] * share / 100:.0f}" for name, share in shares.items())
        figures = ", ".join(rates) + " GB/s" if shares else None
    elif row["experiment"] == "prefill" and row["batch"] == 1:
        rate = PREFILL_TFLOP_PER_S.get(device, {}).get(row["context"])
        figures = rate and f"FA3 {rate} TFLOP/s"
    elif row["experiment"] == "product" and row["weight"] == "qkv":
        figures = f"{GEMM_GB_PER_S[device]} GB/s" if row["rows"] <= 128 else None
        figures = f"about {GEMM_TFLOP_PER_S} TFLOP/s" if row["rows"] >= 2048 else figures
    return figures and f"{figures} ({SOURCE})"
