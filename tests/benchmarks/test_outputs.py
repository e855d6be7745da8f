"""benchmarks/engine/outputs.py compares two runs to the bit, and notices one different logprob."""

import json

import pytest

from tests.benchmarks.test_benchmarks import run

SCRIPT = "engine/outputs.py"


@pytest.mark.deep
def test_equal_and_different_outputs(tmp_path):
    file = tmp_path / "before.json"
    written = run(SCRIPT, "--write", str(file))
    assert written.returncode == 0 and "0 preemptions" not in written.stdout.split("\n"), written.stderr
    equal = run(SCRIPT, "--against", str(file))
    assert equal.returncode == 0 and "equal to the bit" in equal.stdout
    content = json.loads(file.read_text())
    assert len(content) == 200
    logprobs = next(each for result in content for *_, each in result["outputs"] if each)
    entry = next(iter(logprobs[0].values()))
    entry[0] = (float.fromhex(entry[0]) * (1 - 2**-50)).hex()
    file.write_text(json.dumps(content))
    different = run(SCRIPT, "--against", str(file))
    assert different.returncode == 1 and different.stdout.count("1 of 200 requests differ") == 1
