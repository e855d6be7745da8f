"""Streaming text: never half a character, never a piece of a stop string."""

import codecs
import copy
import json
import os
import shutil

import pytest
import sentencepiece as spm
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jpaged.demo import DIRECTORY
from jpaged.tokenizer import (
    Detokenizer,
    TokenDecoder,
    Vocabulary,
    backend,
    encode,
    load_tokenizer,
    tokenize_bad_words,
)
from tests.support import tokenizer_kinds
from tests.support.models import EOS, SPECIAL, byte_tokenizer

TOKENIZER = byte_tokenizer()


def stream(text: str | list[int], *, skip_special_tokens: bool = True, **options) -> tuple[list[str], str | None]:
    """The pieces that come out, and the stop string that ended them."""
    tokens = TOKENIZER.encode(text).ids if isinstance(text, str) else text
    decoder = TokenDecoder(Vocabulary(TOKENIZER), [], skip_special_tokens=skip_special_tokens)
    detokenizer, pieces = Detokenizer(decoder, **options), []
    for token in tokens:
        piece, stop = detokenizer.step(token)
        pieces.append(piece)
        if stop is not None:
            return pieces, stop
    return [*pieces, detokenizer.flush()], None


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30)


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_pieces_are_whole_characters_and_add_up(text):
    pieces, _ = stream(text)
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab c", max_size=30),
    st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_string_ends_the_text_and_never_leaks(text, stops, include):
    pieces, stop = stream(text, stop=stops, include_stop=include)
    # What a reader of the whole text would cut, token by token: the first moment at which any stop string is in it.
    expected, cut = text, None
    for end in range(1, len(text) + 1):
        hits = [(text[:end].find(s), s) for s in stops if s in text[:end]]
        if hits:
            at, cut = min(hits)
            expected = text[: at + len(cut)] if include else text[:at]
            break
    assert "".join(pieces) == expected and stop == cut


def test_text_is_held_back_only_while_it_could_still_become_a_stop_string():
    assert stream("xENEND!", stop=["END"])[0] == ["x", "", "", "EN", "", ""]
    assert stream("xEx", stop=["END"])[0] == ["x", "", "Ex", ""]


def test_special_tokens_are_left_out_or_kept():
    tokens = [*TOKENIZER.encode("a").ids, EOS, *TOKENIZER.encode("b").ids]
    assert "".join(stream(tokens)[0]) == "ab"
    assert "".join(stream(tokens, skip_special_tokens=False)[0]) == "a<|end|>b"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=40))
def test_no_sequence_of_tokens_breaks_it(tokens):
    pieces, _ = stream(tokens)
    assert isinstance("".join(pieces), str)


def test_a_space_at_the_start_of_the_output_is_kept(tiny):
    tokenizer = backend(load_tokenizer(tiny))
    detokenizer = Detokenizer(TokenDecoder(Vocabulary(tokenizer), tokenizer.encode("Once").ids))
    assert "".join(detokenizer.step(t).text for t in tokenizer.encode(" upon").ids) == " upon"


def test_a_sentencepiece_model_encodes_as_sentencepiece_does(tmp_path):
    texts = [
        "Once upon a time there was a little fox.",
        "Who are you? said the bear.",
        "I am a fox, and you are a bear.",
    ]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(4 * texts), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(tmp_path)
    processor = spm.SentencePieceProcessor(model_file=f"{tmp_path}/tokenizer.model")
    for text in [*texts, "a new héllo 🙂", "two  spaces"]:
        bos, *tokens = encode(tokenizer, text)
        assert bos == 1 and tokens == processor.encode(text)
        detokenizer = Detokenizer(TokenDecoder(Vocabulary(backend(tokenizer)), [bos]))
        assert "".join(detokenizer.step(token).text for token in tokens).strip() == text


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer: the tokenizer of .* can't be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"object has no tokenizers\.Tokenizer inside"):
        backend(object())


def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    directory, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(DIRECTORY, directory)
    classes = "PreTrainedTokenizerFast as Own, PretrainedConfig as Config"
    (directory / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import {classes}\n")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    automatic = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Config"}
    foreign = config | {"tokenizer_class": "Own", "auto_map": automatic}
    (directory / "tokenizer_config.json").write_text(json.dumps(foreign))
    with pytest.raises(
        ValueError, match=r"^tokenizer: .* needs code of the checkpoint \(auto_map in .*, which is not run$"
    ):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))  # a class that is known
    model = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(model | {"auto_map": automatic, "model_type": "own"}))
    assert encode(load_tokenizer(directory), "Once") == encode(load_tokenizer(DIRECTORY), "Once")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["special_tokens_map.json", "notes.txt", "additional_chat_templates/tool.jinja"])
def test_files_of_a_tokenizer_are_regular_and_its_own(tmp_path, name):
    directory = tmp_path / "model"
    shutil.copytree(DIRECTORY, directory)
    (directory / name).parent.mkdir(exist_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ValueError, match=f"^tokenizer: {directory / name} must be a regular file"):
        load_tokenizer(directory)
    (directory / name).unlink()
    (tmp_path / "elsewhere").write_text("{}")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"^tokenizer: {directory / name} must not be a link out of"):
        load_tokenizer(directory)


def test_a_huge_tokenizer_is_refused_before_it_is_read(tmp_path):
    shutil.copytree(DIRECTORY, tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "tokenizer.json", 2**26 + 1)  # without blocks on the disk
    with pytest.raises(ValueError, match=r"^tokenizer: .*tokenizer\.json must have at most 67108864 bytes"):
        load_tokenizer(tmp_path)


def sentencepiece_like() -> Tokenizer:
    """As Llama 1 and 2 have it: spaces as "▁", unknown characters as bytes, the first space of a text left out."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlopnu"]
    merges = [("▁", "u"), ("▁u", "p"), ("▁up", "o"), ("▁upo", "n"), ("h", "e"), ("l", "l"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@given(st.text("abch loupn世é🙂", min_size=1, max_size=20))
def test_a_tokenizer_with_byte_fallback(text):
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(TokenDecoder(Vocabulary(tokenizer), tokenizer.encode("once").ids))
    pieces = [detokenizer.step(token).text for token in tokenizer.encode(text).ids]
    assert "".join(pieces) == " " + text and not any("\ufffd" in piece for piece in pieces)


def test_tokens_that_the_tokenizer_does_not_know():
    """A model's vocabulary may be padded beyond its tokenizer's."""
    tokens = [*TOKENIZER.encode("a").ids, 5000, *TOKENIZER.encode("b").ids]
    assert "".join(stream(tokens)[0]) == "ab"


def _demo_with(tmp_path, **changes):
    """The demo model's tokenizer, with other parts in its tokenizer.json."""
    shutil.copytree(DIRECTORY, tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    return tmp_path


def test_prompts_are_neither_cut_nor_filled_up_whatever_the_file_says(tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|end|>"}  # fmt: skip
    text = "Once upon a time there was a fox"
    expected = encode(load_tokenizer(DIRECTORY), text)
    assert encode(load_tokenizer(_demo_with(tmp_path, truncation=truncation, padding=padding)), text) == expected


@pytest.mark.parametrize(
    "changes",
    [{"model": {"type": "Unigram", "vocab": []}},
     {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}],
    ids=["a panic", "an error"],
)  # fmt: skip
def test_a_tokenizer_that_fails_with_its_first_text_is_not_loaded(changes, tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer: the tokenizer of {tmp_path} can't be loaded"):
        load_tokenizer(_demo_with(tmp_path, **changes))


def _byte_level(*, add_prefix_space: bool) -> Tokenizer:
    """Bytes, a few words, parts of "é" and "🦊" with a space, and added tokens of both kinds."""
    words = ["Ġf", "Ġfo", "Ġfox", "ĠÃ", "©s", "Ġð", "ĠðŁ", "¦Ĭ"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(word[:-1], word[-1]) for word in words]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*alphabet, *words])}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("[begin]", special=True), AddedToken("<é世>", special=True)])
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("世 界"), AddedToken("  ")])
    return tokenizer


def _metaspace() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abfox", "▁▁", "▁fox", "世", "\ufffd"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return _with_added(tokenizer)


def _word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "the", "fox", "##es", "##é", "##,", ",", "n't", "[x]", "\ufffd"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _with_added(tokenizer)


TOKENIZERS = {
    "bytes": (TOKENIZER, "a"),
    "byte level": (_byte_level(add_prefix_space=False), "f"),
    "byte level with a prefix space": (_byte_level(add_prefix_space=True), "f"),
    "sentencepiece": (_with_added(sentencepiece_like()), "a"),
    "metaspace": (_metaspace(), "a"),
    "word pieces": (_word_pieces(), "fox"),
    "demo": (Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")), "a"),
}  # with a word that begins a text


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, often of bytes and of spaces, and sometimes those of a text with long characters."""
    size = tokenizer.get_vocab_size() + 2
    text = st.text("ab fox世é🦊", max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    parts = st.one_of(st.lists(st.integers(0, size - 1), max_size=6), text)
    return st.lists(parts, max_size=4).map(lambda parts: [token for part in parts for token in part])


def every_second(first: int) -> list:
    """All tokenizers, of which every second one is in the usual tier."""
    return [
        pytest.param(name, marks=[] if number % 2 == first else pytest.mark.deep)
        for number, name in enumerate(TOKENIZERS)
    ]


@pytest.mark.parametrize("name", every_second(0))
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_and_texts_of_tokens_join_to_their_text(name, data):
    tokenizer, word = TOKENIZERS[name]
    start = [tokenizer.token_to_id(word)]
    tokens, vocabulary = data.draw(_ids(tokenizer)), Vocabulary(tokenizer)
    joined = b"".join(map(vocabulary.bytes, tokens))
    whole = tokenizer.decode(start + tokens, skip_special_tokens=False).removeprefix(word)
    if "\ufffd" not in whole:
        assert joined.decode() == whole
    elif not any("<0x" in piece for piece in tokenizer.get_vocab()):  # byte fallback gives up on each byte of a run
        assert joined.decode(errors="replace") == whole
    texts = list(map(vocabulary.text, tokens))
    assert "\ufffd" in whole or any("\ufffd" in text for text in texts) or "".join(texts) == whole
    assert texts == [vocabulary.bytes(token).decode(errors="replace") for token in tokens]


@pytest.mark.parametrize("name", every_second(1))
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_streamed_text_is_that_of_all_tokens_whatever_came_before(name, data):
    """Also at the start of a text, behind bytes that are no text, and in copies."""
    tokenizer, word = TOKENIZERS[name]
    skip, tokens = data.draw(st.booleans()), data.draw(_ids(tokenizer))
    prompt = [tokenizer.token_to_id(word)] if data.draw(st.booleans()) else []
    vocabulary = Vocabulary(tokenizer)
    decoder, text = TokenDecoder(vocabulary, prompt, skip_special_tokens=skip), ""
    for token in tokens:
        copy.copy(decoder).step(data.draw(st.sampled_from(tokens)))
        decoder = copy.copy(decoder)
        text += decoder.step(token)
    whole = tokenizer.decode(prompt + tokens, skip_special_tokens=skip)[len(word) if prompt else 0 :]
    if "\ufffd" not in whole:
        assert text == whole
    elif prompt:  # unfinished bytes at the end are no text yet
        shown = [token for token in tokens if not (skip and token in vocabulary.special)]
        assert text == codecs.utf_8_decode(b"".join(map(vocabulary.bytes, shown)), "replace")[0]


def test_a_token_has_its_own_bytes_even_if_they_are_no_character():
    for name, piece, data in [
        ("sentencepiece", "▁upon", b" upon"), ("sentencepiece", "<0xE4>", b"\xe4"), ("sentencepiece", "<0x41>", b"A"),
        ("byte level", "ĠðŁ", b" \xf0\x9f"), ("byte level", "¦Ĭ", b"\xa6\x8a"),
        ("byte level", "<é世>", "<é世>".encode()),
        ("metaspace", "▁▁", b"  "), ("metaspace", "\ufffd", b"\xef\xbf\xbd"),
        ("word pieces", "##é", "é".encode()), ("word pieces", "fox", b" fox"), ("word pieces", "[begin]", b" [begin]"),
    ]:  # fmt: skip
        tokenizer, _ = TOKENIZERS[name]
        assert Vocabulary(tokenizer).bytes(tokenizer.token_to_id(piece)) == data, piece


def test_words_keep_their_space_behind_bytes_that_are_no_text():
    tokenizer, _ = TOKENIZERS["sentencepiece"]
    tokens = [tokenizer.token_to_id(piece) for piece in ("▁upon", "<0xC3>", "<0xA9>", "<0xFF>", "▁up", "<0xE2>", "▁up")]
    decoder = TokenDecoder(Vocabulary(tokenizer), [])
    assert [decoder.step(token) for token in tokens] == ["upon", "", "é", "\ufffd", " up", "", "\ufffd up"]


def test_tags_of_tool_calls_are_text_even_as_special_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>", "<|x|>")])
    vocabulary = Vocabulary(tokenizer)
    detokenizer = Detokenizer(TokenDecoder(vocabulary, []))
    tokens = tokenizer.encode("a<|x|><tool_call>b</tool_call>").ids
    assert "".join(detokenizer.step(token).text for token in tokens) == "a<tool_call>b</tool_call>"
    assert vocabulary.special == {tokenizer.token_to_id(text) for text in (*SPECIAL, "<|x|>")}


def test_bad_words_have_the_tokens_of_a_beginning_and_of_the_middle_of_a_text():
    tokenizer, _ = tokenizer_kinds.made("gpt2")
    word, inside = (tuple(tokenizer.encode(text).ids) for text in ("positive", " positive"))
    assert set(tokenize_bad_words(tokenizer, ["positive"])) == {word, inside}
    assert set(tokenize_bad_words(tokenizer, [" positive"])) == {word, inside}
    assert tokenize_bad_words(tokenizer, ["", "a", "a"]).count(tuple(tokenizer.encode("a").ids)) == 1


def test_a_copied_detokenizer_goes_on_by_itself_and_holds_nothing_of_the_tokenizers_library():
    """Branches of a request are copies, and `tokenizers.decoders.DecodeStream` can't be copied before 0.23."""
    detokenizer, (first, *rest) = (
        Detokenizer(TokenDecoder(Vocabulary(TOKENIZER), []), stop=["éz"]),
        TOKENIZER.encode("é!").ids,
    )
    detokenizer.step(first)
    branch = copy.copy(detokenizer)
    assert "".join(branch.step(token).text for token in rest) == "é!"
    assert "".join(detokenizer.step(token).text for token in TOKENIZER.encode("éa").ids[1:]) == "éa"
    state = [value for each in (branch, branch._decoder) for value in vars(each).values()]
    assert {type(value).__module__ for value in state} == {"builtins", "jpaged.tokenizer"}
