"""A leader without HTTP: it generates, and then obeys one command from standard input.

python -m tests.parallel.leader_process MODEL ADDRESS run|skip    writes a line of JSON to standard output
"""

import itertools
import json
import logging
import sys

from jpaged import SamplingParams
from jpaged.cli.nodes import facts_of, leading
from jpaged.parallel.nodes import Nodes
from tests.parallel.traffic import config, fail_once, generate
from tests.support.few_shapes import few_shapes


def main(model: str, address: str, *, run: bool) -> None:
    settings = config(model)
    nodes = Nodes(nnodes=2, dist_init_addr=address)
    with leading(nodes, settings) as followers:
        from jpaged.start.load import start_engine
        from jpaged.start.setup import prepare
        from tests.runtime.test_runner import Compilations

        setup = prepare(settings, nnodes=2)
        followers.check_facts(facts_of(setup))
        engine = start_engine(setup, progress=False, lead=followers.lead)
        (channel,) = followers.channels.values()
        told = {}
        if run:
            with Compilations() as compilations:
                told["outputs"], told["steps"] = generate(engine)
            told |= {"frames": channel.num_frames, "bytes": channel.num_bytes, "compilations": compilations.count}
            told |= {"swapped": engine.scheduler.num_swapped_blocks, "preemptions": engine.scheduler.num_preemptions}
            fail_once(engine)
            told["again"], _ = generate(engine)
        print(json.dumps(told), flush=True)
        if sys.stdin.readline() == "loop\n":
            for i in itertools.count():
                engine.add(str(i), [5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
                while engine.has_work:
                    engine.step()
                if i == 0:
                    print("looping", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    with few_shapes():
        main(sys.argv[1], sys.argv[2], run=sys.argv[3] == "run")
