"""Checks of new requests: whether a request can ever run, and the settings that follow from its parameters."""

import bisect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from jpaged.config import Limits
from jpaged.core.bans import Bans
from jpaged.core.params import MAX_TOP, BeamSearchParams, ContextLengthExceeded, InvalidParameter, Params
from jpaged.core.request import Request


class Capacity(NamedTuple):
    """Sizes of an engine that limit every request.

    Attributes:
        num_blocks: blocks of the KV pool.
        block_size: tokens of a block.
        most_held: as in `BlockPool`.
        eos_token_ids: end-of-sequence tokens that the model can produce.
        num_pages: pages for the states of recurrent layers; 0 for models without such layers.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    most_held: tuple[int | None, ...]
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_pages: int = 0

    def max_sequence_len(self, prompt_len: int = 0, num_sequences: int = 1) -> int:
        """Return the maximum number of tokens of each of some sequences that share a prompt.

        The last sampled token is never written, so it needs no slot.
        """

        def num_blocks(num_tokens: int) -> int:
            each = -(-(num_tokens - 1) // self.block_size)
            shared = min(prompt_len // self.block_size, each)
            blocks = shared + num_sequences * (each - shared)
            return sum(blocks if most is None else min(blocks, num_sequences * most) for most in self.most_held)

        longest = self.limits.max_model_len
        if num_blocks(longest) <= self.num_blocks:
            return longest
        return bisect.bisect_right(range(1, longest + 1), self.num_blocks, key=num_blocks)


def make_request(
    request_id: str,
    prompt: list[int],
    params: Params,
    seed: int,
    bad_words: Iterable[tuple[int, ...]],
    capacity: Capacity,
) -> Request:
    """Return a request with resolved parameters that can run on an engine.

    Args:
        prompt: token ids.
        bad_words: token ids of each text that the output must not contain. Texts with a token that the model can't
            produce are ignored.

    Raises:
        InvalidParameter: the request could never run. The message has the numbers.
    """
    _check_tokens(prompt, params, capacity)
    params, width, limit = _with_counts(params, capacity), params.num_sequences, capacity.limits.max_num_seqs
    name = "beam_width" if isinstance(params, BeamSearchParams) else "best_of" if params.best_of else "n"
    if width > limit:
        raise InvalidParameter(name, f"{width} sequences exceed the {limit} of a step (max_num_seqs)")
    if capacity.num_pages and (pages := 2 * width if width > 1 else 1) > capacity.num_pages:
        has = f"the pool has {capacity.num_pages} pages for states of recurrent layers"
        raise InvalidParameter(name, f"{width} sequences may need {pages}, and {has}")
    max_tokens = _max_tokens(len(prompt), params, capacity)
    producible = [word for word in bad_words if all(0 <= token < capacity.vocab_size for token in word)]
    endings, allowed = capacity.eos_token_ids.union(params.stop_token_ids), params.allowed_token_ids
    bans = Bans(producible, endings, params.min_tokens, allowed=allowed, vocab_size=capacity.vocab_size)
    eos_tokens = frozenset[int]() if params.ignore_eos else capacity.eos_token_ids
    num_top = _num_top(params, capacity)
    return Request(
        request_id, list(prompt), params, seed, max_tokens, bans=bans, eos_tokens=eos_tokens, num_top=num_top
    )


def _check_tokens(prompt: list[int], params: Params, capacity: Capacity) -> None:
    bound = f"is outside the vocabulary [0, {capacity.vocab_size})"
    if not prompt:
        raise InvalidParameter("prompt", "must hold at least one token")
    # A prompt can be long, and the engine's other requests wait meanwhile: no loop in Python unless a token is invalid.
    if set(map(type, prompt)) != {int} or not (min(prompt) >= 0 and max(prompt) < capacity.vocab_size):
        invalid = next(x for x in prompt if type(x) is not int or not 0 <= x < capacity.vocab_size)
        raise InvalidParameter("prompt", f"token id {invalid!r} {bound}")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        for token in getattr(params, name, None) or ():
            if not 0 <= token < capacity.vocab_size:
                raise InvalidParameter(name, f"{token} {bound}")
    if isinstance(params, BeamSearchParams) and _num_candidates(params, capacity) > MAX_TOP:
        sizes = f"{len(params.stop_token_ids)} and a beam_width of {params.beam_width}"
        raise InvalidParameter("stop_token_ids", f"{sizes} are more than {MAX_TOP}")


def _with_counts(params: Params, capacity: Capacity) -> Params:
    """Return parameters whose numbers of logprobs are explicit: -1 stands for the whole vocabulary."""
    limit, explicit = capacity.limits.max_logprobs, dict[str, Any]()
    for name in ("logprobs", "prompt_logprobs"):
        requested = getattr(params, name)
        count = capacity.vocab_size if requested == -1 else requested
        if count is not None and count > limit:
            raise InvalidParameter(name, f"must be at most {limit} (max_logprobs), not {requested}")
        if count != requested:
            explicit[name] = count
    return replace(params, **explicit) if explicit else params


def _max_tokens(prompt_len: int, params: Params, capacity: Capacity) -> int:
    width = params.num_sequences
    limit = capacity.max_sequence_len(prompt_len, width)
    max_tokens = max(1, limit - prompt_len) if params.max_tokens is None else params.max_tokens
    if prompt_len + max_tokens > limit:
        bound = "max_model_len" if limit == capacity.limits.max_model_len else "the size of the KV pool"
        bound += "" if width == 1 else f", for {width} sequences"
        raise ContextLengthExceeded(
            "prompt" if prompt_len >= limit else "max_tokens",
            # OpenAI's words, by which clients recognise this error.
            f"This model's maximum context length is {limit} tokens ({bound}). However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} in the completion). Please "
            "reduce the length of the prompt or completion.",
        )
    return max_tokens


def _num_top(params: Params, capacity: Capacity) -> int | None:
    """Return the number of tokens to list with each sample; None: neither list nor rank."""
    if isinstance(params, BeamSearchParams):
        # Any candidate may complete a stop string.
        return max(params.logprobs or 0, MAX_TOP if params.stop else _num_candidates(params, capacity))
    return len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs


def _num_candidates(params: BeamSearchParams, capacity: Capacity) -> int:
    """Return the number of most likely tokens that each beam needs: `beam_width` to continue, and all that may end."""
    return params.beam_width + len(capacity.eos_token_ids.union(params.stop_token_ids))
