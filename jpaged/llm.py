"""Offline API."""

import contextlib
import functools
import itertools
import json
import logging
import operator
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Unpack, cast

import numpy as np
from tqdm import tqdm

from jpaged.chat import Encoder, prompt_of
from jpaged.config import EngineConfig
from jpaged.core import commands
from jpaged.core.commands import Command, InFlight, PauseMode, Sleep, UpdateParams, WakeUp
from jpaged.core.lora_request import LoRARequest
from jpaged.core.params import BeamSearchParams, InvalidParameter, Params, SamplingParams, plain, shown
from jpaged.core.pooling import normalized
from jpaged.core.request import Request, RequestOutput
from jpaged.engine.engine import RequestOptions
from jpaged.engine.guard import Guard
from jpaged.engine.output import request_output
from jpaged.flags import engine_settings
from jpaged.models.base import Model
from jpaged.replay.comparison import Identity, Replay, replay
from jpaged.runtime.parameters import ModuleArrays
from jpaged.start.adapter import adapter_command
from jpaged.start.load import load_engine
from jpaged.tokenizer import encode
from jpaged.worker import POLL_S, Worker

logger = logging.getLogger(__name__)

# A text, token ids (an array or a list), or {"prompt": text or "prompt_token_ids": ids, "cache_salt": text}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
LoRA = str | LoRARequest | None
_Job = tuple[list[int], Params, RequestOptions]  # the token ids of a request that has not been added yet, and the rest
BINARY = (bytes, bytearray, memoryview)  # no prompts, although they are sequences of integers


class LLM:
    """Model that is ready to generate.

    Its steps run on a thread of its own: an interrupt ends a call and leaves the LLM usable, calls from several threads
    take turns, and JAX's context managers around a call have no effect on it.

    Args:
        model: "demo", a directory, a file in GGUF, a hub id, or a loaded module (`jpaged.models.base.Model`), whose
            arrays are used without a copy if they lie as the engine's and `dtype` is "auto" or theirs. `generate` takes
            the module's new parameters, if it has some since the last call.
        tokenizer: replaces the model's own. A loaded module without this argument has no tokenizer, and then accepts
            and returns only token ids.
        progress: show progress bars while loading and compiling.
        allow_copy: False: raise an error instead of copying a module's parameters or those of an update, or keeping
            parameters whole on each of several devices. By default a line in the log has the bytes.
        **config: the fields of `EngineConfig`, and keywords of vLLM's `LLM` and of SGLang's engine: some set a field,
            some are not needed (a notice in the log says why), and the others are refused (`jpaged.flags`).

    Raises:
        TypeError: `model` has another type, or a keyword is unknown.
        ValueError: a value is not possible; the message has the field and the limit.
    """

    def __init__(
        self, model: str | os.PathLike[str] | Model = "demo", *, tokenizer: Any = None, progress: bool = True,
        allow_copy: bool = True, **config: Any,
    ):  # fmt: skip
        if not isinstance(model, str | os.PathLike | Model):
            accepted = '"demo", a directory, a hub id or a module such as jpaged.models.llama.Llama'
            raise TypeError(f"model: must be {accepted}, not {type(model).__name__}")
        name, module = ("module", model) if isinstance(model, Model) else (os.fspath(model), None)
        settings, notices = engine_settings(config)
        for notice in notices:
            logger.warning(notice)
        self.engine, self.tokenizer, self._sampling_defaults = load_engine(
            EngineConfig(**{"model": name, **settings}), model=module, tokenizer=tokenizer, progress=progress,
            allow_copy=allow_copy,
        )  # fmt: skip
        self._module = None if module is None else ModuleArrays(module)
        self._serves_module = module is not None
        self._dropped = False  # the parameters, by sleep(2)
        self._guard = Guard(self.engine)
        self._grammars = self.engine.grammar_compiler()
        self._request_ids = itertools.count()
        self._worker = Worker()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | Sequence[Params] | None = None, *,
        use_tqdm: bool = True, priority: int | Sequence[int] = 0, lora_request: LoRA | Sequence[LoRA] = None,
        pin_s: float = 0.0,
    ) -> list[RequestOutput]:  # fmt: skip
        """Generate for each prompt and return the results in the order of the prompts.

        Args:
            prompts: a text, token ids, or several of either; arrays of NumPy and JAX count as lists. A prompt that is a
                dict may have a `cache_salt`; then only prompts with the same salt share its cached prefix.
            sampling_params: for all prompts, or one for each; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar.
            priority: for all prompts, or one for each; under the scheduling policy "priority", lower numbers run first.
            lora_request: the adapter of all prompts, or one for each: its name, or a `LoRARequest`, which is loaded
                when its name is new; None: the model alone.
            pin_s: seconds for which the cached prefixes of these prompts and outputs are evicted after all others,
                within `pinned_share` of the pool.

        Raises:
            InvalidParameter: the engine can't serve a prompt or its parameters; raised before anything is generated.
        """
        arrival_time, arrival_ts = time.time(), time.monotonic()
        prompt_list, rank = prompts_of(prompts), plain(priority)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [params] * len(prompt_list) if isinstance(params, Params) else list(params)
        ranks = [rank] * len(prompt_list) if isinstance(rank, int) else list(rank)
        adapters = [lora_request] * len(prompt_list) if isinstance(lora_request, LoRA) else list(lora_request)
        for name, values in (("sampling_params", each), ("priority", ranks), ("lora_request", adapters)):
            if len(values) != len(prompt_list):
                raise InvalidParameter(
                    name, f"must be one or as many as prompts ({len(prompt_list)}), not {len(values)}"
                )
        if wrong := [shown(one) for one in each if not isinstance(one, Params)]:
            raise InvalidParameter("sampling_params", f"must be SamplingParams or BeamSearchParams, not {wrong[0]}")
        jobs: list[_Job] = []
        for prompt, one, rank, lora in zip(prompt_list, each, ranks, adapters):
            token_ids, text, salt = self.read_prompt(prompt)
            adapter = self._adapter(lora)
            options = RequestOptions(prompt=text, cache_salt=salt, priority=rank, adapter=adapter, pin_s=pin_s)
            jobs.append((token_ids, one, options))
        requests = self._worker.run(lambda stop: self._run(jobs, stop, use_tqdm))
        for metrics in (request.metrics for request in requests):
            metrics.arrival_time = arrival_time
            metrics.first_token_latency = metrics.first_token_ts - arrival_ts
        return self._outputs(requests)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA] = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Return the best continuations of each prompt, best first; arguments and results are those of `generate`."""
        return self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)

    def score(
        self, prompts: Prompt | Sequence[Prompt], completions: Prompt | Sequence[Prompt], *, use_tqdm: bool = False,
        lora_request: LoRA = None,
    ) -> list[list[float]]:  # fmt: skip
        """Return the model's own logprob of each token of the completions, each after its prompt.

        A prompt and its completion together must be shorter than `max_model_len`.

        Args:
            completions: one for each prompt. A text is encoded by itself, with the tokenizer's special tokens, if it
                adds any: token ids are exact.
            lora_request: as in `generate`, for all prompts.

        Raises:
            InvalidParameter: the numbers differ, or the engine can't serve a sequence.
        """
        before = [self.read_prompt(prompt) for prompt in prompts_of(prompts)]
        after = [self.read_prompt(completion)[0] for completion in prompts_of(completions)]
        if len(before) != len(after):
            raise InvalidParameter("completions", f"must be as many as prompts ({len(before)}), not {len(after)}")
        wholes = [
            {"prompt_token_ids": tokens + more, "cache_salt": salt} for (tokens, _, salt), more in zip(before, after)
        ]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = self.generate(wholes, params, use_tqdm=use_tqdm, lora_request=lora_request)
        scores = []
        for output, (tokens, _, _), more in zip(outputs, before, after):
            logprobs = (output.prompt_logprobs or [])[len(tokens) :]
            scores.append([ranked[token].logprob for ranked, token in zip(logprobs, more) if ranked is not None])
        return scores

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "last", normalize: bool = True,
        dimensions: int | None = None, use_tqdm: bool = False, lora_request: LoRA | Sequence[LoRA] = None,
    ) -> np.ndarray:  # fmt: skip
        """Return a vector of each prompt, [N, D] float32, made of the model's last hidden states.

        Args:
            pooling: "last": the state of the last token; "mean": the mean of those of all tokens.
            normalize: scale vectors to length 1.
            dimensions: number of dimensions to keep, for models whose training allows this; None: all.
            lora_request: as in `generate`.

        Raises:
            InvalidParameter: as in `generate`.
        """
        if dimensions is not None and dimensions < 1:
            raise InvalidParameter("dimensions", f"must be at least 1, not {dimensions}")
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, detokenize=False)
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        vectors = [output.outputs[0].pooled or [] for output in outputs]
        shown = [normalized(each, dimensions) if normalize else each[:dimensions] for each in vectors]
        return np.array(shown, np.float32)

    def replay(self, outputs: RequestOutput | Iterable[RequestOutput], *, use_tqdm: bool = True) -> list[Replay]:
        """Compute certified outputs again, and compare tokens, bits of logprobs and finish reasons.

        The outputs may come from any batch or schedule, or from a file (`jpaged.replay.load`).

        Returns:
            The result of each output: equal, the first difference, or why it can't be computed again.
        """

        def work(stop: threading.Event) -> list[Replay]:
            self._prepare()
            runner, requests = self.engine.runner, [outputs] if isinstance(outputs, RequestOutput) else outputs
            check = lambda tokens, params: self.engine.abort(self._add(tokens, params).request_id)
            generate = lambda jobs: self._outputs(self._run([(*job, {}) for job in jobs], stop, use_tqdm))
            return replay(requests, Identity(runner.numerics, runner.fingerprint()), check, generate)

        return self._worker.run(work)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None, use_tqdm: bool = True, *,
        chat_template: str | None = None, add_generation_prompt: bool = True, continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRA | Sequence[LoRA] = None, pin_s: float = 0.0,
    ) -> list[RequestOutput]:  # fmt: skip
        """Generate the next message of one conversation or of several, through the model's chat template.

        Args:
            messages: one conversation, or a list of them, in the form of the OpenAI API; content is text.
            sampling_params: for all conversations, or one for each.
            chat_template: a Jinja template that replaces the tokenizer's template.
            add_generation_prompt: end each prompt with the beginning of the assistant's message.
            continue_final_message: leave the last message open and continue it; needs add_generation_prompt=False.
            tools: descriptions of functions for the template, in the form of the OpenAI API.
            chat_template_kwargs: more variables for the template.
            lora_request, pin_s: as in `generate`.

        Raises:
            ValueError: the template rejects the messages, or a parameter is invalid as in `generate`.
        """
        if not hasattr(self.tokenizer, "apply_chat_template"):
            raise InvalidParameter("messages", "this engine has no tokenizer with chat templates")
        if chat_template is None and getattr(self.tokenizer, "chat_template", None) is None:
            raise InvalidParameter("chat_template", "must be passed, because the model has none")
        single = any(isinstance(each, Mapping) for each in messages)
        render = functools.partial(
            prompt_of, source=chat_template, tools=tools, encoder=Encoder(self.tokenizer),
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
        )  # fmt: skip
        conversations = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        prompts = [render(self.tokenizer, list(map(_for_template, talk))) for talk in conversations]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, pin_s=pin_s
        )  # fmt: skip

    def close(self) -> None:
        """Write the cached prefixes to `kv_cache_dir`, if there is one, for the next start. Call nothing after it."""
        self._worker.run(lambda stop: self.engine.close())

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters of the model's files, `generation_config` and its overrides."""
        return SamplingParams(**self._sampling_defaults)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer: the given one, else Hugging Face's; None if there is none."""
        return self.tokenizer

    def load_adapter(self, name: str, source: Any, *, scale: float = 1.0) -> None:
        """Serve an adapter under a name, in place of an earlier one of this name. Nothing is compiled.

        Args:
            source: a directory, as PEFT saves an adapter; an `nnx.Module` or `nnx.State` with `nnx.LoRA` layers; or
                nested dicts with `lora_a` [I, r] and `lora_b` [r, O] below the names of layers.
            scale: factor of the adapter's products, such as alpha / r; that of a directory is in its config.

        Raises:
            ValueError: the engine has no slots (`enable_lora`), or the adapter does not fit; the message names the
                field, the layer and the limit.
        """
        command = adapter_command(self.engine.runner, name, source, scale)
        self._worker.run(lambda stop: self._control(command))

    def unload_adapter(self, name: str) -> None:
        """Serve no adapter under a name. Raises ValueError if there is none."""
        self._worker.run(lambda stop: self._control(commands.UnloadAdapter(name)))

    def _adapter(self, lora: LoRA) -> str | None:
        """Return the name of a request's adapter, which is loaded if it is new."""
        if isinstance(lora, LoRARequest):
            if lora.lora_name not in self.engine.adapters:
                self.load_adapter(lora.lora_name, lora.lora_path)
            return lora.lora_name
        return lora

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, once the calls before this one have ended."""
        self._worker.run(lambda stop: self._control(commands.ResetPrefixCache()))

    def update_params(self, source: Any, in_flight: InFlight = "recompute") -> None:
        """Serve other parameters, with the arguments and errors of `jpaged.core.commands.UpdateParams`.

        A call of `generate` in another thread goes on with them after its present step, as `in_flight` says.
        """
        self._interlude(UpdateParams(source, in_flight))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Let calls of `generate` wait until `resume`, with the modes and errors of `jpaged.core.commands.Pause`.

        A call whose requests are aborted returns their outputs up to then.
        """
        self._interlude(commands.Pause(mode))

    def resume(self) -> None:
        """End a pause."""
        self._interlude(commands.Resume())

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV pool and of the parameters, as `jpaged.core.commands.Sleep` describes.

        Arrays of a module stay with the module.
        """
        self._interlude(Sleep(level))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back the memory of some parts, or of all, as `jpaged.core.commands.WakeUp` describes.

        Parameters that `sleep(2)` has dropped are the module's present arrays again, which counts as an update, if the
        engine served the module's arrays before or the module has new ones. Others have to be passed to
        `update_params`.
        """
        self._interlude(WakeUp(commands.PARTS if tags is None else frozenset(tags)))

    def _interlude(self, command: Command) -> None:
        """Run a command between two steps of a call in another thread, or at once if there is none."""
        self._worker.interlude(lambda: self._control(command))

    def _control(self, command: Command) -> None:
        module = self._module
        match command:
            case WakeUp(tags) if self._dropped and "weights" in self.engine.asleep.intersection(tags):
                if module and (self._serves_module or module.has_changed):
                    self._control(UpdateParams(module.module))
        self.engine.control(command)
        match command:
            case Sleep(2):
                self._dropped = True
            case UpdateParams(source):
                self._dropped = False
                if module:
                    module.mark()
                    self._serves_module = source is module.module

    def read_prompt(self, prompt: Any, *, continues: bool = False) -> tuple[list[int], str | None, str]:
        """Return a prompt's token ids, its text if it was given as text, and its cache salt.

        Args:
            continues: it is put behind other tokens: special tokens are not added, and it may be empty.

        Raises:
            InvalidParameter: it is no prompt; the message has its form.
        """
        salt = ""
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise InvalidParameter("prompts", f"{', '.join(sorted(unknown))} is not known")
            salt = prompt.get("cache_salt") or ""
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        prompt = prompt if isinstance(prompt, BINARY) else plain(prompt)
        if not isinstance(prompt, str):
            with contextlib.suppress(TypeError):
                tokens = list(prompt)
                if not isinstance(prompt, BINARY) and bool not in map(type, tokens):
                    return list(map(operator.index, tokens)), None, salt
            raise InvalidParameter("prompts", f"must be texts or token ids, not {shown(prompt)}")
        if self.tokenizer is None:
            raise InvalidParameter("prompts", "this engine has no tokenizer, so prompts must be token ids")
        if not prompt and not continues:  # also where the tokenizer would add a token of its own, as in the server
            raise InvalidParameter("prompt", "must hold at least one token")
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidParameter("prompts", f"must not hold half a surrogate pair, as {shown(prompt)}") from None
        return encode(self.tokenizer, prompt, add_special_tokens=not continues), prompt, salt

    def _run(self, jobs: list[_Job], stop: threading.Event, use_tqdm: bool) -> list[Request]:
        """Run requests to their end, or until `stop`; afterwards the engine holds none of them."""
        requests: list[Request] = []
        self._prepare()
        try:
            for tokens, params, placing in jobs:
                requests.append(self._add(tokens, params, **placing))
            self._generate(requests, stop, use_tqdm)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_work:
                self.engine.step()  # which commits the plans in flight
        return requests

    def _prepare(self) -> None:
        """Serve the module's present parameters. Raises RuntimeError if the engine is asleep."""
        if self.engine.asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self.engine.asleep))}): call wake_up first")
        if self._module and self._module.has_changed:
            self._control(UpdateParams(self._module.module))

    def _add(self, tokens: list[int], params: Params, **options: Unpack[RequestOptions]) -> Request:
        """Queue a request."""
        if params.structured_outputs and self._grammars:
            options["constraint"] = self._grammars.compile(params.structured_outputs)
        return self.engine.add(str(next(self._request_ids)), tokens, params, **options)

    def _outputs(self, requests: Iterable[Request]) -> list[RequestOutput]:
        return [request_output(request, self.engine.vocabulary) for request in requests]

    def _generate(self, requests: list[Request], stop: threading.Event, use_tqdm: bool) -> None:
        tokens = 0
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            while self.engine.scheduler.has_work and not stop.is_set():
                self._worker.run_interludes(0.0 if self.engine.has_work else POLL_S)
                output = self._guard.step()
                tokens += sum(len(delta.samples) for delta in output.deltas)
                bar.update(len(output.ended) + len(output.faults))
                elapsed = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{tokens / elapsed:.0f} tokens/s" if elapsed else "", refresh=False)


def prompts_of(value: Any) -> list[Any]:
    """Return a list of prompts from one prompt or several."""
    value = value if isinstance(value, BINARY) else plain(value)
    if isinstance(value, (str, Mapping, *BINARY)):
        return [value]
    if not isinstance(value, Iterable):
        raise InvalidParameter("prompts", f"must be texts or token ids, not {shown(value)}")
    prompts = list(value)
    return [prompts] if prompts and isinstance(plain(prompts[0]), Integral) else prompts


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message of the OpenAI API as chat templates expect it.

    Content becomes text, and arguments of tool calls become objects.
    """
    if not isinstance(message, Mapping):
        form = '{"role": "user", "content": "..."}'
        raise InvalidParameter("messages", f"must be dicts like {form}, or lists of them, not {shown(message)}")
    content = message.get("content") or ""
    rendered = {**message, "content": content if isinstance(content, str) else "".join(map(_text, content))}
    if message.get("tool_calls"):
        rendered["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in message["tool_calls"]
        ]
    return rendered


def _text(part: Any) -> str:
    """Return the text of a part of a message's content."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise InvalidParameter("messages", f"content must be text, not {shown(part)}")
    return text


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call as an object, or as they are if a model was cut off while it wrote them."""
    arguments = function.get("arguments") or {}
    with contextlib.suppress(ValueError):
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments
