# /// script
# requires-python = ">=3.12"
# dependencies = ["dspy>=3.4,<4"]
# ///
"""DSPy. It asks this model for JSON in words only, which the demo model does not follow."""

import dspy
from scenarios import MODEL, PROMPT, URL, run

lm = dspy.LM(f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key="none", max_tokens=300, cache=False, num_retries=0)


def chat():
    assert lm(PROMPT)[0]


run(chat)
