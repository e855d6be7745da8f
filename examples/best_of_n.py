"""Generate eight stories for a prompt, and keep the one that another model finds likeliest.

python examples/best_of_n.py

The eight share the KV blocks of the prompt. The judge here is the same demo model without the sampling temperature.
"""

import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.rl import RolloutWorker

PROMPTS = ["Once upon a time, a girl named", "One day, the dog"]


def main() -> None:
    worker = RolloutWorker(LLM("demo", max_num_seqs=16, max_model_len=256))
    rollouts = worker.generate(PROMPTS, SamplingParams(n=8, temperature=1.5, max_tokens=40, seed=1))
    scores = worker.score(rollouts).sum(1) / rollouts.is_output.sum(1)  # mean logprob of a token
    for index, prompt in enumerate(PROMPTS):
        rows = np.flatnonzero(rollouts.prompts == index)
        best, worst = rows[scores[rows].argmax()], rows[scores[rows].argmin()]
        print(f"{prompt!r}\n  best  {scores[best]:.2f}: {rollouts.texts[best]!r}")
        print(f"  worst {scores[worst]:.2f}: {rollouts.texts[worst]!r}")


if __name__ == "__main__":
    main()
