"""Metrics of several replicas as one text."""

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of all replicas in Prometheus's text format, each with a label `replica`.

    Args:
        texts: metrics in the same format, by the replica's id.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels=sample.labels | {"replica": replica}) for sample in family.samples
            ]
    return generate_latest(_Merged(families.values()))
