"""The offline API."""

import itertools
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.core.params import BeamSearchParams, SamplingParams
from jpaged.core.request import Request, RequestOutput
from jpaged.engine import request_output
from jpaged.load import load_engine
from jpaged.tokenizer import backend, encode, render_chat

if TYPE_CHECKING:
    from jpaged.model.llama import Llama

# A text, token ids, or {"prompt": text or "prompt_token_ids": ids, "cache_salt": text}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams


class LLM:
    """A model that is ready to generate.

    Args:
        model: "demo", a directory, a hub id, or a `jpaged.model.llama.Llama` in hand, whose arrays are then served as
            they are, without a copy.
        tokenizer: instead of the model's own; a module in hand has none unless one is passed, and then takes and
            gives token ids alone.
        progress: show progress bars while loading and compiling.
        **config: the fields of `EngineConfig`.

    Raises ValueError, with the field and the limit, for what can't be.
    """

    def __init__(self, model: "str | Llama" = "demo", *, tokenizer: Any = None, progress: bool = True, **config: Any):
        name, module = (model, None) if isinstance(model, str) else ("module", model)
        self.engine, self.tokenizer, _ = load_engine(
            EngineConfig(model=name, **config), model=module, tokenizer=tokenizer, progress=progress
        )
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for each prompt; results in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or several of either; as a dict, a prompt can bring a `cache_salt`,
                without which nobody shares its cached prefix.
            params: for all prompts, or one for each; None is `SamplingParams()`.
            priority: for all prompts, or one for each; under the scheduling policy "priority", lower numbers run first.

        Raises InvalidParameter, before anything is generated, if a prompt or its parameters can't be served.
        """
        single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        prompt_list = cast(list[Prompt], [prompts] if single else list(prompts))
        if params is None or isinstance(params, SamplingParams | BeamSearchParams):
            params = [params or SamplingParams()] * len(prompt_list)
        priorities = [priority] * len(prompt_list) if isinstance(priority, int) else priority
        for name, values in (("params", params), ("priority", priorities)):
            if len(values) != len(prompt_list):
                raise ValueError(f"{name}: {len(values)} of them for {len(prompt_list)} prompts")
        requests: list[Request] = []
        try:
            for prompt, each, rank in zip(prompt_list, params, priorities):
                requests.append(self._add(prompt, each, rank))
            self._run(requests, use_tqdm)
        finally:
            for request in requests:  # after an error or an interrupt nothing stays behind
                self.engine.abort(request.request_id)
        inner = backend(self.tokenizer) if self.tokenizer is not None else None
        return [request_output(request, inner) for request in requests]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The best continuations of each prompt, best first, as `generate` takes and gives them."""
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self.engine.scheduler.pool.reset_prefix_cache()

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates the assistant's turn of one conversation, through the model's chat template."""
        return self.generate(render_chat(self.tokenizer, messages), params, use_tqdm=use_tqdm)

    def _add(self, prompt: Prompt, params: Params, priority: int) -> Request:
        salt = ""
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise ValueError(f"prompts: {', '.join(sorted(unknown))} is not known")
            salt = prompt.get("cache_salt") or ""
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompts: this engine has no tokenizer, so prompts must be token ids")
            ids, text = encode(self.tokenizer, prompt), prompt
        else:
            ids, text = list(map(operator.index, cast(Sequence[int], prompt))), None  # numpy's integers too
        name = str(next(self._request_ids))
        return self.engine.add(name, ids, params, prompt=text, priority=priority, cache_salt=salt)

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        tokens = 0
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                tokens += sum(len(delta.samples) for delta in self.engine.step().deltas)
                bar.update(len(requests) - len(self.engine.scheduler.requests) - bar.n)
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s" if elapsed else "", refresh=False)
