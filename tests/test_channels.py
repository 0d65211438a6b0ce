"""Queue pairs of a communicator whose layout is known get their channels, and only then."""

from __future__ import annotations

import polars as pl

from pulse_bpf.analysis.attribute import FLOWS
from pulse_bpf.analysis.channels import with_channels
from pulse_bpf.schema import conform

# Channels 0 and 2 go from rank 0 to 1, channel 1 the other way; its tree joins them, too.
LAYOUT = conform(
    pl.DataFrame(
        {
            "comm_id": "x",
            "rank": 0,
            "channel": [0, 1, 2],
            "ring_next": [1, 2, 1],
            "ring_prev": [2, 1, 2],
            "tree_up": [None, None, None],
            "tree_down": [[], [1], []],
        }
    ),
    "channels",
)


def _channels(qpns: list[int], ways: list[str | None], nics: list[str] | None = None) -> list[int | None]:
    flows = pl.DataFrame(
        {"flow": range(len(qpns)), "node": "a", "nic": nics or "m", "qpn": qpns}
    ).with_columns(comm_id=pl.lit("x"), use=pl.lit("collective"), rank=0, peer_rank=1)
    flows = flows.select(
        (pl.col(name) if name in flows.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in FLOWS.items()
    )
    directions = pl.DataFrame(
        {"flow": range(len(qpns)), "direction": ways}, schema_overrides={"flow": pl.UInt64}
    )
    return with_channels(flows, directions.drop_nulls(), LAYOUT)["channel"].to_list()


def test_queue_pairs_are_made_in_the_order_of_channels() -> None:
    assert _channels([9, 5, 7, 6], ["tx", "tx", "tx", "rx"]) == [2, 0, 1, 1]


def test_what_is_not_as_the_layout_has_it_is_unknown() -> None:
    assert _channels([5, 6], ["tx", "rx"]) == [None, 1]
    assert _channels([5, 6, 7], ["tx", "tx", None]) == [None, None, None]
    assert _channels([5, 6, 7], ["tx", "tx", "tx"], ["m", "n", "m"]) == [None, None, None]
