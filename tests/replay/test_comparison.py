"""The comparison of outputs with those of a scripted engine."""

import dataclasses

import pytest

from jpaged import BeamSearchParams, InvalidParameter
from jpaged.replay.comparison import Identity, replay
from tests.replay.test_file import OUTPUTS, certificate

ONE = dataclasses.replace(OUTPUTS[0], outputs=OUTPUTS[0].outputs[:1])
HERE = Identity({"dtype": "float32"}, "ab")


def compared(again, outputs=(ONE,), check=lambda *_: None):
    """Return the results in words, and the parameters of the requests that replay them."""
    jobs = []

    def generate(made):
        jobs.extend(made)
        return [dataclasses.replace(ONE, outputs=again)] * len(jobs)

    return list(map(str, replay(outputs, HERE, check, generate))), jobs


def test_a_request_is_computed_again_with_its_seed():
    found, jobs = compared(ONE.outputs)
    assert found == ["equal"] and jobs == [([1, 2], certificate([3, 4]).request_params)] and jobs[0][1].seed == 5


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"certificate": None, "finish_reason": "error", "stop_reason": "NaN"},
         "not replayed, finish_reason: the replay ended with error (NaN)"),
        ({"certificate": dataclasses.replace(certificate([3, 4]), parameters=("ab", "cd"))},
         "not replayed, parameters: were exchanged during the replay"),
    ],
)  # fmt: skip
def test_a_replay_that_was_disturbed_says_so(changes, told):
    assert compared([dataclasses.replace(ONE.outputs[0], **changes)])[0] == [told]


def test_the_beams_of_one_search_are_computed_in_one_request():
    beams = dataclasses.replace(certificate([3, 4]), params=BeamSearchParams(beam_width=2, max_tokens=2))
    outputs = [
        dataclasses.replace(ONE.outputs[0], index=index, token_ids=ids, certificate=beams.sealed([1, 2], ids))
        for index, ids in enumerate(([3, 4], [3, 5]))
    ]
    found, jobs = compared(outputs, [dataclasses.replace(ONE, outputs=outputs)])
    assert found == ["equal", "equal"] and len(jobs) == 1
    found, jobs = compared(outputs[::-1], [dataclasses.replace(ONE, outputs=outputs)])
    assert found == ["token 1: 4 in the output, 5 in the replay", "token 1: 5 in the output, 4 in the replay"]


def test_nothing_is_generated_for_outputs_that_are_refused():
    def check(prompt, params):
        raise InvalidParameter("n", "too many")

    assert compared(None, check=check) == (["not replayed, n: too many"], [])
    assert compared(None, OUTPUTS[1:]) == ([], [])
