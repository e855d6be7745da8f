"""Choice of the next token, inside the step.

Random bits depend only on (seed, position), so a request's tokens do not depend on its neighbours. Sorting the
vocabulary is slow on a GPU. Thresholds are found by bisection instead, and the best tokens in the chunks with the
highest maxima.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.runtime.device_rows import SamplingState, count_tokens
from jpaged.runtime.sampling_row import Sampling
from jpaged.runtime.sampling_settings import Settings
from pallas_kernels import Masks, Ops, load
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.reductions import row_argmax, row_logsumexp, row_max, row_sum
from pallas_kernels.sampling import cooled, masked

# Shorter lists are found in less time: 20 is the most logprobs, 72 the widest beam search with 8 ending tokens.
SHORT_LISTS = (20, 72, 128)
NUM_LIKELY = 72  # number of the likeliest tokens; the filters search among these first


class Sampled(NamedTuple):
    """Chosen tokens.

    Logprobs and ranks are of the model's distribution, except for a beam's list, or of the distribution that tokens are
    drawn from (`SampleOptions.processed`).
    """

    tokens: jax.Array  # [S] int32
    logprobs: jax.Array  # [S] float32; NaN where the logits are not finite
    ranks: jax.Array  # [S] int32, 1: no token is likelier; 0 where no list is wanted
    top_tokens: jax.Array  # [S, K] int32, best first, equal ones by id, or those of the state; -1 past num_top
    top_logprobs: jax.Array  # [S, K] float32; -inf past num_top


class SampleOptions(NamedTuple):
    """Static arguments of `sample`.

    Attributes:
        num_top: K, the longest list of best tokens that a sample may ask for; V if that is less.
        processed: describe the distribution after masks, bias, penalties, temperature and filters, instead of the
            model's own. That costs a search of the vocabulary for the samples with filters.
        settings: the settings that samples use at most; `ANY` if `processed`.
        several: whether there are executables for several settings, whose results must have the same bits.
        at_once: samples that are computed at once with any settings, which takes memory for several arrays of logits;
            None: all.
        ops: the ops of sampling.
    """

    num_top: int
    processed: bool = False
    settings: Settings = Settings.ANY
    several: bool = False
    at_once: int | None = None
    ops: Ops = Ops(load(REFERENCE))


def count(state: SamplingState, sampling: Sampling) -> SamplingState:
    """Return the state with the tokens before the samples counted if they are output, and no drafts.

    Jitted callers donate it.
    """
    counted_s = sampling.stateful & (sampling.positions > sampling.num_prompt_tokens) & (sampling.num_drafts == 0)
    return count_tokens(state, sampling.rows, jnp.where(counted_s, sampling.last_tokens, -1))


def count_kept(state: SamplingState, sampling: Sampling, tokens_s: jax.Array, by: int = 1) -> SamplingState:
    """Return the state with the drafts counted that were drawn in their places, with all drafts of their rows before.

    Args:
        tokens_s: [S] int32, the tokens that were drawn.
        by: -1 to take back the counts.
    """
    is_kept_s = sampling.last_tokens == jnp.roll(tokens_s, 1)
    before_sk = jnp.arange(len(tokens_s))[:, None] - jnp.arange(sampling.drafts.shape[1])
    are_kept_s = jnp.all(is_kept_s[before_sk] | (sampling.drafts < 0), axis=1)
    counted_s = sampling.stateful & (sampling.num_drafts > 0) & are_kept_s
    return count_tokens(state, sampling.rows, jnp.where(counted_s, sampling.last_tokens, -1), by)


def sample(logits_sv: jax.Array, state: SamplingState, sampling: Sampling, options: SampleOptions) -> Sampled:
    """Return the next token of each row.

    The order is vLLM's: mask, bias, penalties, then greedy, or temperature, min-p, top-k, top-p and a draw. A row that
    allows no token gets token 0.

    Args:
        logits_sv: [S, V] float32.
        state: the result of `count`.
        sampling: arrays for S samples.
    """
    k, ops = min(options.num_top, logits_sv.shape[1]), options.ops
    if options.processed:
        describe = lambda logits_sv, sampling: _sample_processed(logits_sv, state, sampling, k, ops)
        return cast(Sampled, _by_parts(describe, (logits_sv, sampling), options.at_once))
    best_s, lse_s = ops.argmax_and_lse(logits_sv)
    if options.several:  # operations that only some executables have are not fused with these
        logits_sv, best_s, lse_s = lax.optimization_barrier((logits_sv, best_s, lse_s))
    if options.settings is Settings.ANY:
        drawn_s = sampling.temperature > 0
        is_simple_s = ~(sampling.stateful | sampling.beam | sampling.filtered)
        is_simple_s &= sampling.num_top <= 1
        is_any = jnp.any(drawn_s | sampling.masked | (sampling.num_top > 0))
        arrays = logits_sv, best_s, lse_s, sampling
        choices = [
            lambda: (best_s, *_no_lists(len(best_s), k)),
            lambda: _choose_simple(*arrays, k, ops),
            lambda: _by_parts(functools.partial(_choose, state=state, k=k, ops=ops), arrays, options.at_once),
        ]
        tokens, *lists = lax.switch(jnp.where(jnp.all(is_simple_s), is_any.astype(jnp.int32), 2), choices)
    else:
        tokens = best_s
        if options.settings is not Settings.GREEDY:
            tokens = _draw(logits_sv, best_s, sampling, ops, options.settings)
        lists = _no_lists(len(tokens), k)
    return Sampled(tokens, _logprobs(logits_sv, tokens, lse_s), *lists)


def _by_parts(function: Callable[..., Any], arrays: tuple[Any, ...], most: int | None) -> Any:
    """Return the result of a function for arrays of S rows, which is computed for a part of the rows at a time.

    Args:
        most: maximum rows of a part; None: S. If no number from half of it on divides S, there is one part.
    """
    rows = len(arrays[0])
    size = next((n for n in range(most, most // 2 - 1, -1) if rows % n == 0), rows) if most else rows
    if size == rows:
        return function(*arrays)
    parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), arrays)
    return jax.tree.map(lambda y: y.reshape(rows, *y.shape[2:]), lax.map(lambda part: function(*part), parts))


def _choose_simple(
    logits_sv: jax.Array, best_s: jax.Array, lse_s: jax.Array, sampling: Sampling, k: int, ops: Ops
) -> tuple[jax.Array, ...]:
    """Return the results of `_choose` for rows without state, filters and beams, with lists of one token."""
    masks, listed_s = _masks(sampling), sampling.num_top > 0
    allowed_s = lax.cond(
        jnp.any(sampling.masked), lambda: ops.argmax_and_lse(logits_sv, masks)[0], lambda: best_s
    )  # fmt: skip
    tokens = _draw_any(logits_sv, allowed_s, sampling, ops, masks)
    first_k = (jnp.arange(k) == 0) & listed_s[:, None]
    best_s1 = _at(logits_sv, best_s)[:, None] - lse_s[:, None]
    lists = jnp.where(first_k, best_s[:, None], -1), jnp.where(first_k, best_s1, -jnp.inf)
    return tokens, ops.ranks(logits_sv, tokens, listed_s), *lists


def _choose(
    logits_sv: jax.Array, best_s: jax.Array, lse_s: jax.Array, sampling: Sampling, state: SamplingState, k: int,
    ops: Ops,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Return the tokens [S] of samples with any settings, their ranks, and the lists [S, K]."""
    listed_s = sampling.num_top > 0

    def process() -> tuple[jax.Array, jax.Array]:
        x_sv = _process(logits_sv - jnp.where(sampling.beam, lse_s, 0)[:, None], state, sampling)
        return x_sv, ops.argmax_and_lse(x_sv)[0]

    is_processed = jnp.any(sampling.masked | sampling.stateful | sampling.beam)
    x_sv, best_s = lax.cond(is_processed, process, lambda: (logits_sv, best_s))
    tokens = _draw(x_sv, best_s, sampling, ops)

    def describe() -> tuple[jax.Array, ...]:
        values_sv = jnp.where(sampling.beam[:, None], x_sv, logits_sv)
        offset_s = jnp.where(sampling.beam, 0, lse_s)
        return ops.ranks(logits_sv, tokens, listed_s), *_list(values_sv, offset_s, state, sampling, k, ops)

    return tokens, *lax.cond(jnp.any(listed_s), describe, lambda: _no_lists(len(tokens), k))


def _sample_processed(logits_sv: jax.Array, state: SamplingState, sampling: Sampling, k: int, ops: Ops) -> Sampled:
    """Return the result of `sample` with the logprobs of the distribution that tokens are drawn from."""
    _, lse_s = ops.argmax_and_lse(logits_sv)
    x_sv = _process(logits_sv - jnp.where(sampling.beam, lse_s, 0)[:, None], state, sampling)
    best_s, _ = ops.argmax_and_lse(x_sv)
    kept_sv = _keep_likely(cooled(x_sv, sampling.temperature), sampling)
    # Rounded, or else a multiplication could be fused with the subtraction of the offset.
    z_sv = lax.optimization_barrier(jnp.where((sampling.temperature > 0)[:, None], kept_sv, x_sv))
    tokens = _draw(x_sv, best_s, sampling, ops)
    # A beam's list is that of `sample`. A row that allows no token has no distribution.
    is_offset_s = ~sampling.beam & (row_max(z_sv) > -jnp.inf)
    offset_s = jnp.where(is_offset_s, ops.argmax_and_lse(z_sv)[1], 0)
    logprobs = jnp.where(jnp.isfinite(lse_s), _at(z_sv, tokens) - offset_s, jnp.nan)
    ranks = ops.ranks(z_sv, tokens, sampling.num_top > 0)
    return Sampled(tokens, logprobs, ranks, *_list(z_sv, offset_s, state, sampling, k, ops))


def token_logprobs(
    logits_of: Callable[[jax.Array], jax.Array], x_td: jax.Array, targets_t: jax.Array, num_top: int, ops: Ops,
    tile: int = 64,
) -> Sampled:  # fmt: skip
    """Return the logprobs of given tokens, in the form of `sample`'s result for T rows with `targets_t` chosen.

    At most `tile` rows of logits exist at once, and none where a tile has no target.

    Args:
        logits_of: [t, D] -> [t, V] float32.
        x_td: [T, D].
        targets_t: [T] int32; -1 = not wanted: logprob 0, rank 0, and a list of -1 and -inf.
        num_top: K, static; V if that is less.
        ops: the ops of sampling.
    """
    num_tokens, width = x_td.shape
    k = min(num_top, jax.eval_shape(logits_of, x_td).shape[1])
    tile = min(tile, num_tokens)
    padding = -num_tokens % tile

    def compute(x_td: jax.Array, targets_t: jax.Array) -> Sampled:
        logits_tv = logits_of(x_td)
        _, lse_t = ops.argmax_and_lse(logits_tv)
        wanted_t = targets_t >= 0
        tokens_t = jnp.where(wanted_t, targets_t, 0)
        logprobs = jnp.where(wanted_t, _logprobs(logits_tv, tokens_t, lse_t), 0)
        ranks = ops.ranks(logits_tv, tokens_t, wanted_t)
        return Sampled(targets_t, logprobs, ranks, *_list_top(logits_tv, lse_t, jnp.where(wanted_t, k, 0), k, ops))

    skip = lambda x_td, targets_t: Sampled(targets_t, jnp.zeros(tile, jnp.float32), *_no_lists(tile, k))
    x_ntd = jnp.pad(x_td, ((0, padding), (0, 0))).reshape(-1, tile, width)
    targets_nt = jnp.pad(targets_t, (0, padding), constant_values=-1).reshape(-1, tile)
    tiles = lax.map(lambda xs: lax.cond(jnp.any(xs[1] >= 0), compute, skip, *xs), (x_ntd, targets_nt))
    return cast(Sampled, jax.tree.map(lambda y: y.reshape(num_tokens + padding, *y.shape[2:])[:num_tokens], tiles))


def _at(x_sv: jax.Array, tokens_s: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_sv, tokens_s[:, None], axis=1)[:, 0]


def _logprobs(logits_sv: jax.Array, tokens_s: jax.Array, lse_s: jax.Array) -> jax.Array:
    """Return the tokens' logprobs [S], NaN for a row with a NaN or an infinite logit.

    The row's sum of exponentials shows such logits at no cost.
    """
    return jnp.where(jnp.isfinite(lse_s), _at(logits_sv, tokens_s) - lse_s, jnp.nan)


def _masks(sampling: Sampling) -> Masks:
    return Masks(sampling.allowed_bits, sampling.masked)


def _process(x_sv: jax.Array, state: SamplingState, sampling: Sampling) -> jax.Array:
    """Return logits, or beams' log-probabilities, with masks, bias and penalties."""
    num_rows, vocab_size = x_sv.shape
    stateful, repetition = sampling.stateful[:, None], sampling.repetition[:, None]

    x_sv = masked(x_sv, _masks(sampling))
    rows_s = jnp.where(sampling.stateful, sampling.rows, 0)
    at_sk = jnp.where(sampling.drafts < 0, vocab_size, sampling.drafts)  # past the end: dropped
    counts_sv = state.output_counts[rows_s].at[jnp.arange(num_rows)[:, None], at_sk].add(1, mode="drop")
    in_prompt_sv = state.in_prompt[rows_s]
    y_sv = x_sv + state.bias[rows_s]
    # -inf stays as it is, also where float32 makes the repetition penalty 0.
    seen_sv = (in_prompt_sv | (counts_sv > 0)) & (y_sv > -jnp.inf)
    y_sv = jnp.where(seen_sv, jnp.where(y_sv > 0, y_sv / repetition, y_sv * repetition), y_sv)
    y_sv -= sampling.frequency[:, None] * counts_sv
    y_sv -= sampling.presence[:, None] * (counts_sv > 0)
    return jnp.where(stateful, y_sv, x_sv)


def _draw(
    x_sv: jax.Array, best_s: jax.Array, sampling: Sampling, ops: Ops, settings: Settings = Settings.ANY
) -> jax.Array:
    """Return tokens [S] int32: drawn from softmax(x / temperature) of the tokens that the filters keep, or the best.

    DRAWN: no row has filters; FILTERED: some row has filters; ANY: the device finds out.
    """

    def draw_filtered() -> jax.Array:
        drawn_s = sampling.temperature > 0
        return jnp.where(drawn_s, _draw_filtered(cooled(x_sv, sampling.temperature), sampling, ops), best_s)

    draw_any = functools.partial(_draw_any, x_sv, best_s, sampling, ops)
    if settings is not Settings.ANY:
        return draw_any() if settings is Settings.DRAWN else draw_filtered()
    return cast(jax.Array, lax.cond(jnp.any(sampling.filtered), draw_filtered, draw_any))


def _draw_any(
    x_sv: jax.Array, best_s: jax.Array, sampling: Sampling, ops: Ops, masks: Masks | None = None
) -> jax.Array:
    """Return tokens [S] int32 drawn from softmax(x / temperature), or the best of rows without a temperature."""
    drawn_s = sampling.temperature > 0

    def draw() -> jax.Array:
        tokens_s = ops.gumbel_argmax(x_sv, sampling.temperature, sampling.seeds, sampling.positions, masks)
        return jnp.where(drawn_s, tokens_s, best_s)

    return cast(jax.Array, lax.cond(jnp.any(drawn_s), draw, lambda: best_s))


def _draw_filtered(x_sv: jax.Array, sampling: Sampling, ops: Ops) -> jax.Array:
    """Return tokens [S] int32 drawn from softmax(x) of the tokens that the filters keep, for rows with a temperature.

    The filters usually keep fewer tokens than the list of the best has. Such a row is drawn from the list only. The
    whole vocabulary is searched and given noise only if another row needs it, which does not change this row's token.
    """
    tokens_sk, x_sk, _, kept_sk, listed_s = _likely(x_sv, sampling, ops)
    drawn_s = sampling.temperature > 0
    noise_sk = ops.gumbel(sampling.seeds, sampling.positions, tokens_sk)
    from_list_s = _at(tokens_sk, row_argmax(jnp.where(kept_sk, x_sk, -jnp.inf) + noise_sk))

    def draw_others() -> jax.Array:
        kept_sv = lax.cond(
            jnp.any(sampling.filtered & ~listed_s),
            lambda: jnp.where(listed_s[:, None], x_sv, _keep_likely(x_sv, sampling)),
            lambda: x_sv,
        )
        others_s = jnp.where(drawn_s & ~listed_s, jnp.float32(1), 0)  # their temperature: x has been divided by it
        tokens_s = ops.gumbel_argmax(kept_sv, others_s, sampling.seeds, sampling.positions)
        return jnp.where(listed_s, from_list_s, tokens_s)

    return cast(jax.Array, lax.cond(jnp.any(drawn_s & ~listed_s), draw_others, lambda: from_list_s))


def _likely(x_sv: jax.Array, sampling: Sampling, ops: Ops) -> tuple[jax.Array, ...]:
    """Return a list of the likeliest tokens [S, K], and which of them the filters keep.

    The results are the tokens, their values, the least value that is kept [S, 1], whether each token of the list is
    kept, and whether no others are [S].
    """
    # XLA would turn this selection into a sort of the whole vocabulary, because slices follow it.
    tokens_sk, x_sk = lax.optimization_barrier(ops.top(x_sv, min(NUM_LIKELY, x_sv.shape[1])))
    threshold_s1 = _threshold_of_list(x_sv, x_sk, sampling, ops)
    kept_sk = (x_sk >= threshold_s1) & (x_sk > -jnp.inf)
    return tokens_sk, x_sk, threshold_s1, kept_sk, ~kept_sk[:, -1] | (x_sk.shape == x_sv.shape)


def kept_tokens(
    logits_sv: jax.Array, state: SamplingState, sampling: Sampling, tokens_s: jax.Array, ops: Ops
) -> jax.Array:
    """Return the tokens that samples were drawn from, [S, ceil(V / 8)] uint8: bit t % 8 of byte t // 8 for token t.

    A greedy sample has its token alone. Beams have no meaningful result.

    Args:
        tokens_s: the samples, which `sample` returned for these arguments.
    """
    x_sv = cooled(_process(logits_sv, state, sampling), sampling.temperature)
    _, _, threshold_s1, _, listed_s = _likely(x_sv, sampling, ops)
    others_sv = lax.cond(jnp.all(listed_s), lambda: x_sv, lambda: _keep_likely(x_sv, sampling))
    kept_sv = jnp.where(listed_s[:, None], x_sv >= threshold_s1, others_sv > -jnp.inf) & (x_sv > -jnp.inf)
    is_token_sv = jnp.arange(x_sv.shape[1]) == tokens_s[:, None]
    return jnp.packbits((kept_sv & (sampling.temperature > 0)[:, None]) | is_token_sv, axis=1, bitorder="little")


def _threshold_of_list(x_sv: jax.Array, x_sk: jax.Array, sampling: Sampling, ops: Ops) -> jax.Array:
    """Return the least value [S, 1] of a token that min-p, then top-k, then top-p keep, as far as a list can tell.

    The list `x_sk` is the best of `x_sv`, best first. The value is too low only if it keeps the list's last token.
    """
    size, best_s1, top_p_s = x_sk.shape[1], x_sk[:, :1], sampling.top_p
    top_k_s = jnp.where(sampling.top_k < x_sv.shape[1], sampling.top_k, 0)
    at_k_s = jnp.where((top_k_s > 0) & (top_k_s <= size), _at(x_sk, jnp.clip(top_k_s, 1, size) - 1), -jnp.inf)
    least_s1 = jnp.maximum(best_s1 + jnp.log(sampling.min_p)[:, None], at_k_s[:, None])
    weight_sk = jnp.where(x_sk >= least_s1, jnp.exp(x_sk - best_s1), 0)
    total_s1 = _total(x_sv, best_s1, least_s1, x_sk[:, -1:] < least_s1, weight_sk, ops)
    # A token is in the nucleus if the tokens before it have less than top_p of the total weight.
    in_nucleus_sk = jnp.cumsum(weight_sk, -1) - weight_sk < top_p_s[:, None] * total_s1
    last_s = jnp.maximum(in_nucleus_sk.sum(-1, dtype=jnp.int32), 1) - 1
    # The total is that of the tokens kept by top-k only if the list has all of them.
    is_total_s = (top_k_s <= size) | (x_sk[:, -1] < least_s1[:, 0])
    nucleus_s = jnp.where((top_p_s < 1) & is_total_s, _at(x_sk, last_s), -jnp.inf)
    return jnp.maximum(least_s1, nucleus_s[:, None])


def _total(
    x_sv: jax.Array, best_s1: jax.Array, least_s1: jax.Array, has_all_s1: jax.Array, weight_sk: jax.Array, ops: Ops
) -> jax.Array:
    """Return the sum of exp(x - best) of the tokens of at least `least`, [S, 1].

    Args:
        has_all_s1: whether a list has all of these tokens.
        weight_sk: their numbers exp(x - best) in the list.
    """
    _, lse_s = ops.argmax_and_lse(x_sv)
    of_all_s1, of_list_s1 = jnp.exp(lse_s[:, None] - best_s1), row_sum(weight_sk)[:, None]
    is_other_s1 = (least_s1 > -jnp.inf) & ~has_all_s1
    of_others_s1 = lax.cond(
        jnp.any(is_other_s1),
        lambda: row_sum(jnp.where(x_sv >= least_s1, jnp.exp(x_sv - best_s1), 0))[:, None],
        lambda: of_list_s1,
    )
    return jnp.where(least_s1 == -jnp.inf, of_all_s1, jnp.where(has_all_s1, of_list_s1, of_others_s1))


def _keep_likely(x_sv: jax.Array, sampling: Sampling) -> jax.Array:
    """Return the logits of the tokens kept by min-p, top-k and top-p, in this order, and -inf for all other tokens.

    Tokens of equal logits stay together.
    """
    x_sv = jnp.where(x_sv >= row_max(x_sv)[:, None] + jnp.log(sampling.min_p)[:, None], x_sv, -jnp.inf)
    # As uint32 they compare as the float32 do, -0 like 0.
    bits_sv = lax.bitcast_convert_type(jnp.where(x_sv == 0, jnp.float32(0), x_sv), jnp.uint32)
    order_sv = jnp.where(bits_sv >> 31 == 1, ~bits_sv, bits_sv | jnp.uint32(0x80000000))
    size = jnp.where(sampling.top_k > 0, sampling.top_k, x_sv.shape[1]).astype(jnp.float32)
    kept = order_sv >= _threshold(order_sv, jnp.ones_like(x_sv), size)
    kept_sv = jnp.where(kept, x_sv, -jnp.inf)
    p_sv = jnp.exp(kept_sv - row_logsumexp(kept_sv)[:, None])
    nucleus = order_sv >= _threshold(order_sv, p_sv, sampling.top_p)
    return jnp.where(kept & (nucleus | (sampling.top_p >= 1)[:, None]), x_sv, -jnp.inf)


def _threshold(order_sv: jax.Array, weight_sv: jax.Array, target_s: jax.Array) -> jax.Array:
    """Return the largest t [S, 1] with a total weight of at least `target` at or above t, found bit by bit, or 0."""

    def bit(i: jax.Array, t: jax.Array) -> jax.Array:
        higher = t | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        weight = row_sum(jnp.where(order_sv >= higher[:, None], weight_sv, 0))
        return jnp.where(weight >= target_s, higher, t)

    return cast(jax.Array, lax.fori_loop(0, 32, bit, jnp.zeros(order_sv.shape[0], jnp.uint32))[:, None])


def _list(
    values_sv: jax.Array, offset_s: jax.Array, state: SamplingState, sampling: Sampling, k: int, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """Return the listed tokens of each row, as `_list_top` does: the best tokens, or the state's."""
    tokens_sk, best_sk = _list_top(values_sv, offset_s, sampling.num_top, k, ops)
    named_sm = state.listed[sampling.rows, :k]
    values_sm = jnp.take_along_axis(values_sv, jnp.maximum(named_sm, 0), axis=1) - offset_s[:, None]
    named_sk, values_sk = (jnp.pad(x_sm, ((0, 0), (0, k - x_sm.shape[1]))) for x_sm in (named_sm, values_sm))
    is_named_s1 = (sampling.stateful & jnp.any(named_sm >= 0, axis=1))[:, None]
    listed_sk = jnp.arange(k) < sampling.num_top[:, None]
    return (
        jnp.where(is_named_s1, jnp.where(listed_sk, named_sk, -1), tokens_sk),
        jnp.where(is_named_s1, jnp.where(listed_sk, values_sk, -jnp.inf), best_sk),
    )


def _list_top(
    values_sv: jax.Array, offset_s: jax.Array, num_top_s: jax.Array, k: int, ops: Ops
) -> tuple[jax.Array, jax.Array]:
    """Return the `num_top` best tokens of each row and their values above `offset`, [S, k], padded with -1 and -inf."""
    sizes = [*(size for size in SHORT_LISTS if size < k), k]

    def padded(size: int) -> list[jax.Array]:
        return [jnp.pad(y_sk, ((0, 0), (0, k - size))) for y_sk in ops.top(values_sv, size)]

    level = jnp.searchsorted(np.asarray(sizes, np.int32), num_top_s.max())
    tokens_sk, best_sk = lax.switch(level, [functools.partial(padded, size) for size in sizes])
    listed_sk = jnp.arange(k) < num_top_s[:, None]
    return jnp.where(listed_sk, tokens_sk, -1), jnp.where(listed_sk, best_sk - offset_s[:, None], -jnp.inf)


def _no_lists(num_rows: int, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ranks, top tokens and their logprobs of rows that want none."""
    tops = jnp.full((num_rows, k), -1, jnp.int32), jnp.full((num_rows, k), -jnp.inf, jnp.float32)
    return jnp.zeros(num_rows, jnp.int32), *tops
