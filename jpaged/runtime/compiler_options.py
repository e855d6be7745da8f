"""Options of XLA's GPU compiler for the functions of a step."""

from typing import Any

# Command buffers (CUDA graphs) with conditions and loops: outside a command buffer the host waits for their predicates.
# XLA's own list lacks loops. An older driver leaves conditions out; the host then waits.
COMMAND_BUFFERS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"


def model_options(platform: str, *, has_quantized_weights: bool) -> dict[str, Any] | None:
    """Return the options of the model's part of a step, None for XLA's own."""
    if platform == "cpu":
        return None
    options: dict[str, Any] = {
        # XLA would hand a kernel a pointer to a slice, wherever it starts in its array: Mosaic's runtime refuses
        # pointers off a multiple of 256 bytes (openxla/xla pull request 43831 made this the default).
        "xla_gpu_enable_dynamic_slice_fusion": False,
        # XLA would concatenate the weights of several products of one array in every step.
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
    if has_quantized_weights:
        # cuBLAS takes no weights of 8 bits: they would be converted, into memory, in every step.
        options["xla_gpu_cublas_fallback"] = False
    return options


def sampling_options(platform: str) -> dict[str, Any] | None:
    """Return the options of sampling and of the logprobs of prompts, None for XLA's own."""
    return None if platform == "cpu" else {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS}
