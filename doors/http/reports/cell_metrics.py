"""The numbers of a cell in the format of Prometheus: of its brokers, and of the NATS nodes that keep its journal."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from qb.core.broker.cell_report import CellReport


def cell_metrics(cell: CellReport) -> Iterator[Metric]:
    """Return them; the broker that answers is the owner."""
    yield GaugeMetricFamily("qb_cluster_epoch", "The epoch of the owner that answers.", value=cell.epoch)
    yield from _brokers(cell)
    yield from _nodes(cell)


def _brokers(cell: CellReport) -> Iterator[Metric]:
    present = GaugeMetricFamily("qb_cluster_broker_up", "1 while a broker announces itself.", labels=["broker"])
    what = "Records of the journal that a broker's copy is behind the owner."
    lag = GaugeMetricFamily("qb_cluster_broker_lag_records", what, labels=["broker"])
    damaged = GaugeMetricFamily(
        "qb_cluster_broker_damaged_files", "Files of a broker's copy that could not be proved.", labels=["broker"]
    )
    for each in cell.brokers:
        damaged.add_metric([each.name], each.damaged_files)
        present.add_metric([each.name], each.role != "gone")
        if each.lag is not None:
            lag.add_metric([each.name], each.lag)
    yield from (present, lag, damaged)


def _nodes(cell: CellReport) -> Iterator[Metric]:
    journal = cell.journal
    healthy = GaugeMetricFamily(
        "qb_cluster_node_current", "1 while a NATS node has all of the journal, as far as is known.", labels=["node"]
    )
    lag = GaugeMetricFamily("qb_cluster_node_lag_records", "Records that a NATS node is behind.", labels=["node"])
    missing = GaugeMetricFamily("qb_cluster_node_missing_records", "Records that a NATS node lacks.", labels=["node"])
    damaged = GaugeMetricFamily(
        "qb_cluster_node_damaged_records", "Damaged records that the newest pass over a node found.", labels=["node"]
    )
    for each in journal.nodes:
        healthy.add_metric([each.name], each.current)
        lag.add_metric([each.name], each.lag)
        missing.add_metric([each.name], each.missing)
        damaged.add_metric([each.name], each.damaged)
    yield from (healthy, lag, missing, damaged)
    writable = GaugeMetricFamily("qb_cluster_journal_writable", "1 while most NATS nodes take records.")
    writable.add_metric([], journal.error is None)
    yield writable
    spare = "How many more NATS nodes may die before work stops; below 0: it has stopped."
    yield GaugeMetricFamily("qb_cluster_spare_nodes", spare, value=cell.spare_nodes)
    yield GaugeMetricFamily("qb_cluster_journal_bytes", "Bytes of the journal on each NATS node.", value=journal.bytes)
    yield GaugeMetricFamily("qb_cluster_journal_records", "Records of the journal.", value=journal.messages)
