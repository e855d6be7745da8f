"""The demo model's text and training: an example of a Flax Llama that jpaged then serves."""
