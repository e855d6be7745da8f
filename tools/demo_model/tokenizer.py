"""The demo model's tokenizer and chat template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_model.chats import Message

BEGIN, END, SYSTEM, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BEGIN, END, SYSTEM, USER, ASSISTANT)
# The model knows no tools, so the template leaves their definitions out. Calls are printed as they were generated, and
# results are a user's messages.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set role = {'tool': 'user'}.get(message['role'], message['role']) "
    "%}{% if role not in ['system', 'user', 'assistant'] %}{{ raise_exception('the role of a message must be system, "
    "user, assistant or tool') }}{% endif %}{{ '<|' + role + '|>' + message['content'] | trim }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(messages: Iterable[Message]) -> str:
    """Return CHAT_TEMPLATE's text of a whole chat."""
    return BEGIN + "".join(f"<|{message['role']}|>{message['content'].strip()}{END}" for message in messages)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE, in which each digit is a token, and a text starts with BEGIN."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json without white space, and tokenizer_config.json with the chat template."""
    content = json.loads(tokenizer.to_str())
    (directory / "tokenizer.json").write_text(
        json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
