"""The offline API."""

import itertools
import operator
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.core.request import Request, RequestOutput, SamplingParams
from jpaged.engine import request_output
from jpaged.load import load_engine
from jpaged.tokenizer import backend, encode, render_chat

if TYPE_CHECKING:
    from jpaged.model.llama import Llama

Prompt = str | Sequence[int]


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
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for each prompt; results in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or several of either.
            params: for all prompts, or one for each; None is `SamplingParams()`.

        Raises InvalidParameter, before anything is generated, if a prompt or its parameters can't be served.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        prompt_list = cast(list[Prompt], [prompts] if single else list(prompts))
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompt_list)
        if len(params) != len(prompt_list):
            raise ValueError(f"params: {len(params)} of them for {len(prompt_list)} prompts")
        requests: list[Request] = []
        try:
            requests.extend(self._add(prompt, each) for prompt, each in zip(prompt_list, params))
            self._run(requests, use_tqdm)
        finally:
            for request in requests:  # after an error or an interrupt nothing stays behind
                self.engine.abort(request.request_id)
        inner = backend(self.tokenizer) if self.tokenizer is not None else None
        return [request_output(request, inner) for request in requests]

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates the assistant's turn of one conversation, through the model's chat template."""
        return self.generate(render_chat(self.tokenizer, messages), params, use_tqdm=use_tqdm)

    def _add(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompts: this engine has no tokenizer, so prompts must be token ids")
            ids, text = encode(self.tokenizer, prompt), prompt
        else:
            ids, text = list(map(operator.index, prompt)), None  # numpy's integers too
        return self.engine.add(str(next(self._request_ids)), ids, params, prompt=text)

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        tokens = 0
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                for delta in self.engine.step():
                    tokens += len(delta.token_ids)
                    if delta.finish_reason:
                        bar.update()
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s" if elapsed else "", refresh=False)
