"""Complete a batch of prompts in this process, greedily and with several samples.

python examples/offline_batch.py [MODEL]
"""

import sys

from jpaged import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The little fox", "One day, a girl named"]


def main(model: str = "demo") -> None:
    llm = LLM(model)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    # Both samples share the blocks of the prompt.
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=32))
    for choice in output.outputs:
        print(f"sample {choice.index}: {choice.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
