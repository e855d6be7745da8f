"""Choice of the attention kernels for a model on a device."""

from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.runtime.compilation_cache import cache_folder
from jpaged.runtime.placement import Placement
from pallas_kernels import Kernels, SelfTest, compute_capability, select


def select_kernels(
    config: EngineConfig, model: ModelConfig, block_size: int, dtype: str, placement: Placement, *,
    retest: bool = False,
) -> Kernels:  # fmt: skip
    """Choose the kernels for a model, with the heads that each device holds.

    On a GPU each op is tested first, on one device, unless a result is stored.

    Args:
        retest: ignore stored results.
    """
    device = placement.device
    return select(
        config.kernels, platform=device.platform, device_kind=device.device_kind,
        compute_capability=compute_capability(device), dtype=dtype, pool_dtype=config.pool_dtype(dtype),
        head_dim=model.head_dim, num_heads=model.num_attention_heads // placement.size,
        num_kv_heads=model.num_key_value_heads // placement.kv_size, block_size=block_size,
        self_test=SelfTest.on(device, cache_folder() / "selftest", retest=retest),
    )  # fmt: skip
