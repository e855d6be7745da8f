"""A reader follows the configuration through few files from `load_engine` to an engine."""

import json
import subprocess
import sys

from tests.repository.test_layers import ROOT


def test_the_configuration_is_followed_through_few_files(tiny):
    command = [sys.executable, "-m", "tests.start.walk", str(tiny)]
    walk = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert walk["files"] <= 21 and len(walk["stays"]) <= 34 and walk["climbs"] <= 12, walk
