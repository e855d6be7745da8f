"""One step of the engine as functions of arrays: embed, attend over the pool, sample."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jpaged.config import Limits
from jpaged.core.params import MAX_TOP
from jpaged.models.base import Model
from jpaged.models.layers import multiplying
from jpaged.runtime.batch import Batch, Bucket, Layout
from jpaged.runtime.compiler_options import model_options, sampling_options
from jpaged.runtime.kv_cache import KVCache, Pool
from jpaged.runtime.placement import Placement
from jpaged.runtime.row_table import SCALARS
from jpaged.runtime.sampler import Sampled, Sampling, token_logprobs
from jpaged.runtime.sampling_settings import Settings
from jpaged.runtime.sampling_state import SamplingState
from jpaged.runtime.tensor_parallel import sample_divided, whole_logits
from pallas_kernels.dispatch import RowProduct


def forward(
    model: Model, cache: KVCache, pool: Pool, batch: Batch, *, decode: bool, multiply: RowProduct | None = None
) -> tuple[jax.Array, Pool]:
    """Return the hidden states [T, D] of a batch, and the pool with its keys and values written.

    Args:
        decode: every sequence has one query, a decode token, and query s belongs to sequence s.
        multiply: `Kernels.product`. It computes no padding and, after the last attention, only rows that samples or
            logprobs come from.
    """
    pool, specs = list(pool), model.attention_specs
    wanted_t = jnp.arange(len(batch.tokens)) < batch.num_tokens

    def attend(layer: int, q_tnh: jax.Array, k_tkh: jax.Array, v_tkh: jax.Array, *angles: Any) -> jax.Array:
        nonlocal wanted_t
        own_dtype = jnp.result_type(q_tnh, k_tkh, v_tkh)
        qkv = (x.astype(cache.attention_dtype or x.dtype) for x in (q_tnh, k_tkh, v_tkh))
        o_tnh = cache.attend(pool, layer, specs[layer], batch, decode, *qkv, *angles).astype(own_dtype)
        if layer == len(specs) - 1 and not decode:
            sampled_t = jnp.zeros_like(wanted_t).at[batch.sampled_from].set(True)
            wanted_t &= sampled_t | jnp.any(batch.targets >= 0)
        return o_tnh

    def of_tokens(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array | None:
        # The rows of a model's own product may be others, such as heads.
        return multiply(x_ti, weight_oi, wanted_t if len(x_ti) == len(wanted_t) else None) if multiply else None

    with multiplying(of_tokens):
        return model(batch.tokens, batch.positions, attend), pool


class Computed(NamedTuple):
    """Results of the model's part of a step, on the device, for the other parts."""

    x_sd: jax.Array  # hidden states that samples are drawn from
    rows_sf: jax.Array  # int32, how: `sampling_of` has the columns
    x_td: jax.Array | None  # all hidden states; None in a decode step
    targets_t: jax.Array | None  # likewise, int32: the batch's


class Step:
    """Jitted functions of a step, dispatched one after the other.

    Each is compiled only for the shapes that it depends on. `params` is the flat list of the model's leaves:
    dispatching a model or a state costs many times more on the host. Leaves that no result depends on are not used, and
    may have been deleted. The pool is returned in the order of the argument,
    so that XLA can alias all of its buffers.

    Args:
        graphdef, treedef: of the model; the treedef is that of the list of its states.
        cache: the layout of the pool.
        layouts: layouts of the batches of each bucket.
        placement: the places of all arrays. Results other than the pool are whole on every device.
        processed_logprobs: whether the logprobs of samples are those after temperature, filters and the rest.
        multiply: `Kernels.product`.
        has_quantized_weights: whether weights have 8 bits.

    Attributes:
        forward: (params, pool, last_tokens [R], buffer, bucket) -> (Computed, pool), the pool donated, the bucket
            static; `buffer` holds a batch in the bucket's layout.
        choose: (params, state, last_tokens, x_sd, rows_sf, bits, settings) -> (chosen, listed, state, last_tokens), the
            last two donated, the settings static. chosen: [3, S] int32, tokens, ranks, and the bits of the float32
            logprobs; listed: [2, S, K] int32, the most likely tokens, and the bits of their logprobs. `bits` are masks,
            [S, ceil(V / 32)] uint32.
        score: (params, x_td, targets_t) -> (chosen, listed) of the prompt's own tokens.
        settings: those that `choose` is compiled for, in ascending order.
    """

    def __init__(
        self, graphdef: nnx.GraphDef[Any], treedef: jax.tree_util.PyTreeDef, cache: KVCache,
        layouts: dict[Bucket, Layout], placement: Placement, *, max_logprobs: int = Limits.max_logprobs,
        processed_logprobs: bool = False, multiply: RowProduct | None = None, has_quantized_weights: bool = False,
    ):  # fmt: skip
        def merged(params: list[jax.Array]) -> Model:
            model: Model = nnx.merge(graphdef, *jax.tree.unflatten(treedef, params))
            return model

        def of_all_rows(x_ti: jax.Array, weight_oi: jax.Array) -> jax.Array | None:
            return multiply(x_ti, weight_oi, None) if multiply else None

        def run(
            params: list[jax.Array], pool: list[jax.Array], last_tokens_r: jax.Array, buffer: jax.Array, bucket: Bucket
        ) -> tuple[Computed, Pool]:
            batch = layouts[bucket].unpack(buffer)
            tokens = jnp.where(batch.tokens < 0, last_tokens_r[-1 - batch.tokens], batch.tokens)
            batch = batch._replace(tokens=tokens, decodes=batch.decodes != 0)
            x_td, pool = forward(merged(params), cache, pool, batch, decode=bucket.decode, multiply=multiply)
            at_s = batch.sampled_from
            added = [batch.sample_rows, batch.masked, batch.positions[at_s] + 1, tokens[at_s]]
            rows_sf = jnp.concatenate([batch.scalars, jnp.stack(added, axis=1)], axis=1)
            scored = (None, None) if bucket.decode else (x_td, batch.targets)
            return Computed(x_td[at_s], rows_sf, *scored), pool

        @multiplying(of_all_rows)
        def choose(
            params: list[jax.Array], state: SamplingState, last_tokens_r: jax.Array, x_sd: jax.Array,
            rows_sf: jax.Array, bits: jax.Array, settings: Settings,
        ) -> tuple[jax.Array, jax.Array, SamplingState, jax.Array]:  # fmt: skip
            sampling = sampling_of(rows_sf, bits)
            sampled, state = sample_divided(
                merged(params).logits(x_sd), state, sampling, max(MAX_TOP, max_logprobs), placement,
                processed=processed_logprobs, settings=settings, several=len(self.settings) > 1,
            )  # fmt: skip
            at_s = jnp.where(sampling.rows < 0, len(last_tokens_r), sampling.rows)  # past the end: dropped
            return *_packed(sampled), state, last_tokens_r.at[at_s].set(sampled.tokens, mode="drop")

        @multiplying(of_all_rows)
        def score(params: list[jax.Array], x_td: jax.Array, targets_t: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = merged(params)
            logits_of = lambda x_td: whole_logits(model.logits(x_td), placement)
            return _packed(token_logprobs(logits_of, x_td, targets_t, max(1, max_logprobs)))

        # Results that lay elsewhere than the arguments of the next step would need further executables.
        whole, platform = placement.whole, placement.platform
        self.settings = (Settings.ANY,) if platform == "cpu" or processed_logprobs else tuple(Settings)
        self.forward = jax.jit(
            run, static_argnums=4, donate_argnums=1, out_shardings=(whole, placement.pool),
            compiler_options=model_options(platform, has_quantized_weights=has_quantized_weights),
        )  # fmt: skip
        sampling: Any = dict(out_shardings=whole, compiler_options=sampling_options(platform))
        self.choose = jax.jit(choose, static_argnums=6, donate_argnums=(1, 2), **sampling)
        self.score = jax.jit(score, **sampling)

    def settings_for(self, used: Settings) -> Settings:
        """Return the settings of the executable for a step."""
        return used if used in self.settings else Settings.ANY


def sampling_of(rows_sf: jax.Array, allowed_bits: jax.Array) -> Sampling:
    """Return the sampling settings of a step.

    Args:
        rows_sf: int32, the bits of `SCALARS`, then a column each of rows, of masked, of positions and of the tokens
            before the samples.
        allowed_bits: [S, ceil(V / 32)] uint32.
    """
    names = SCALARS.names or ()
    scalars = {name: lax.bitcast_convert_type(rows_sf[:, i], SCALARS[name]) for i, name in enumerate(names)}
    rows_s, masked_s, positions_s, tokens_s = rows_sf[:, len(names) :].T
    is_output = positions_s > scalars["num_prompt_tokens"]
    return Sampling(
        temperature=scalars["temperature"], top_k=scalars["top_k"], top_p=scalars["top_p"], min_p=scalars["min_p"],
        seeds=jnp.stack([scalars["seed_high"], scalars["seed_low"]], axis=1), positions=positions_s,
        presence=scalars["presence"], frequency=scalars["frequency"], repetition=scalars["repetition"], rows=rows_s,
        stateful=scalars["stateful"] != 0, counted=jnp.where(is_output, tokens_s, -1), beam=scalars["beam"] != 0,
        masked=masked_s != 0, allowed_bits=allowed_bits, num_top=scalars["num_top"],
    )  # fmt: skip


def _packed(sampled: Sampled) -> tuple[jax.Array, jax.Array]:
    """Return [3, S] and [2, S, K] int32: the values fetched for every sample, and the lists."""
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    chosen = jnp.stack([sampled.tokens, sampled.ranks, bits(sampled.logprobs)])
    return chosen, jnp.stack([sampled.top_tokens, bits(sampled.top_logprobs)])
