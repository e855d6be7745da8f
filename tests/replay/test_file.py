"""Files of certified outputs: those of `save`, responses of a server, and lines that are neither."""

import json

import pytest

from jpaged import SamplingParams
from jpaged.core.certificate import Certificate, bits_of
from jpaged.core.request import CompletionOutput, RequestOutput
from jpaged.replay import load, save


def certificate(token_ids, seed=5):
    params, bits = SamplingParams(max_tokens=len(token_ids)), bits_of([-1.0] * len(token_ids))
    numerics = {"dtype": "float32"}
    return Certificate(numerics, ("ab",), ((0, len(token_ids)),), params, seed, bits).sealed([1, 2], token_ids)


OUTPUTS = [
    RequestOutput(
        "7", "é", [1, 2],
        [
            CompletionOutput(1, "ab", [3, 4], 0.0, None, "stop", "b", [0, 0], certificate([3, 4])),
            CompletionOutput(0, "", [], 0.0, None, "abort", None),
        ],
    ),
    RequestOutput("8", None, [1, 2], []),
]  # fmt: skip


def test_outputs_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "outputs.jsonl"
    save(OUTPUTS, path)
    path.write_text(path.read_text() + "\n")
    assert load(path) == OUTPUTS and len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("kind", ["text_completion", "chat.completion"])
def test_responses_of_a_server_are_read(tmp_path, kind):
    """A chat has one prompt. Of completions, each choice has its prompt."""
    prompt = {"prompt_token_ids": [1, 2]}
    of_choice, of_body = (prompt, {}) if kind == "text_completion" else ({"prompt_token_ids": None}, prompt)
    choices = [
        {"index": index, "text": "", "token_ids": [3, index], "stop_reason": None, **of_choice,
         "finish_reason": "tool_calls" if index else "length", "certificate": certificate([3, index]).as_json()}
        for index in range(2)
    ]  # fmt: skip
    path = tmp_path / "responses.jsonl"
    path.write_text(json.dumps({"id": "x-1", "object": kind, "choices": choices, "usage": {}} | of_body))
    found = load(path)
    assert [(each.request_id, each.prompt_token_ids) for each in found] == [("x-1", [1, 2])] * 2
    for index, reason in enumerate(["length", "stop"]):
        (output,) = found[index].outputs
        assert (output.index, output.token_ids, output.finish_reason) == (index, [3, index], reason)
        assert output.certificate == certificate([3, index])


LINE = {"request_id": "1", "prompt": None, "prompt_token_ids": [1, 2], "outputs": [{"index": 0, "token_ids": [3]}]}


@pytest.mark.parametrize(
    "record, told",
    [
        ([1], r"must be a JSON object, not \[1\]"),
        (LINE | {"prompt_token_ids": None}, "prompt_token_ids: must be a list, not None"),
        (LINE | {"prompt_token_ids": [1, "a"]}, r"prompt_token_ids: must be token ids, not \[1, 'a'\]"),
        (LINE | {"outputs": {}}, "outputs: must be a list, not {}"),
        (LINE | {"outputs": [5]}, "an output must be a JSON object, not 5"),
        (LINE | {"outputs": [{"token_ids": [3]}]}, "index: must be a whole number, not None"),
        (LINE | {"outputs": [{"index": 0, "token_ids": [3], "certificate": 5}]}, "certificate: must be an object"),
        (
            {"choices": [{"index": 0, "token_ids": None}], "prompt_token_ids": [1]},
            "token_ids: must be a list, not None",
        ),
        ({"choices": [{"index": 0, "token_ids": [3]}]}, "prompt_token_ids: must be a list, not None"),
        ({"choices": [7]}, "prompt_token_ids: must be a list, not None"),
    ],
)
def test_another_line_is_refused_with_its_number_and_field(tmp_path, record, told):
    path = tmp_path / "outputs.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{json.dumps(record)}\n")
    with pytest.raises(ValueError, match=f"outputs.jsonl: line 2: {told}"):
        load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="line 1: Expecting property name"):
        load(path)
