"""Load tests of servers with the OpenAI API: workloads, traffic, measures, reports."""
