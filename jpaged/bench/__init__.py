"""Load for any server that speaks the OpenAI API, and what it takes: workloads, traffic, measures, reports."""
