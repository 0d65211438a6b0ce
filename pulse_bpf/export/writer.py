"""Writing a Perfetto trace piece by piece: tracks, slices, instants and counters, with a memory that stays as it is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto

# So many are collected, which takes about 1 MB, before they are compressed and written.
CHUNK_PACKETS = 10_000
_SEQUENCE = 1
_NEEDS_STATE = proto.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
_EXPLICIT = proto.TrackDescriptor.EXPLICIT


class TraceWriter:
    """A trace in the schema of perfetto_trace.proto, written to `file`; `close` writes what is still held.

    All times are ns since the Unix epoch, and the trace names that clock (REALTIME). Packets are written in zlib's
    format, in `compressed_packets`; names and texts once, as interned data. Slices of one track must not overlap.
    """

    def __init__(self, file: IO[bytes], first_ns: int) -> None:
        self._file = file
        self._held = proto.Trace()
        self._tracks = 0
        self._ids: dict[tuple[str, str], int] = {}
        packet = self._begun(proto.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
        packet.trace_packet_defaults.timestamp_clock_id = proto.BUILTIN_CLOCK_REALTIME
        packet = self._begun()
        packet.clock_snapshot.primary_trace_clock = proto.BUILTIN_CLOCK_REALTIME
        packet.clock_snapshot.clocks.add(clock_id=proto.BUILTIN_CLOCK_REALTIME, timestamp=first_ns)

    def track(self, name: str, parent: int = 0, unit: str = "", description: str = "") -> int:
        """A new track below `parent` (0: none), a counter where it has a `unit`; its children keep their order."""
        self._tracks += 1
        packet = self._begun()
        track = packet.track_descriptor
        track.uuid, track.name = self._tracks, name
        track.child_ordering, track.sibling_order_rank = _EXPLICIT, self._tracks
        if parent:
            track.parent_uuid = parent
        if description:
            track.description = description
        if unit:
            track.counter.unit_name = unit
        return self._tracks

    def slice(
        self,
        track: int,
        first_ns: int,
        last_ns: int,
        name: str,
        arguments: Mapping[str, Any],
        flow: int | None = None,
    ) -> None:
        """From when to when something lasted; events with one `flow` are linked in the order of time."""
        self._event(track, first_ns, proto.TrackEvent.TYPE_SLICE_BEGIN, name, arguments, flow)
        packet = self._begun()
        packet.timestamp = last_ns
        packet.track_event.type, packet.track_event.track_uuid = proto.TrackEvent.TYPE_SLICE_END, track

    def instant(self, track: int, t_ns: int, name: str, arguments: Mapping[str, Any]) -> None:
        self._event(track, t_ns, proto.TrackEvent.TYPE_INSTANT, name, arguments)

    def count(self, track: int, t_ns: int, value: float) -> None:
        """What a counter is from `t_ns` on."""
        packet = self._begun()
        packet.timestamp = t_ns
        event = packet.track_event
        event.type, event.track_uuid = proto.TrackEvent.TYPE_COUNTER, track
        event.double_counter_value = value

    def close(self) -> None:
        packed = zlib.compress(self._held.SerializeToString())
        self._file.write(
            proto.Trace(packet=[proto.TracePacket(compressed_packets=packed)]).SerializeToString()
        )
        self._held = proto.Trace()

    def _event(
        self,
        track: int,
        t_ns: int,
        kind: int,
        name: str,
        arguments: Mapping[str, Any],
        flow: int | None = None,
    ) -> None:
        packet = self._begun()
        packet.timestamp = t_ns
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        event.name_iid = self._interned(packet, "event_names", name)
        if flow is not None:
            event.flow_ids.append(flow)
        for key, value in arguments.items():
            if value is None:
                continue
            note = event.debug_annotations.add(name_iid=self._interned(packet, "debug_annotation_names", key))
            if isinstance(value, bool):
                note.bool_value = value
            elif isinstance(value, int):
                # A count that was misread may be any number of 64 bits.
                setattr(note, "int_value" if value < 2**63 else "uint_value", value)
            elif isinstance(value, float):
                note.double_value = value
            else:
                note.string_value_iid = self._interned(packet, "debug_annotation_string_values", str(value))

    def _interned(self, packet: Any, table: str, text: str) -> int:
        """The number that stands for `text` from now on; `packet` introduces it when it is new."""
        number = self._ids.get((table, text))
        if number is None:
            number = self._ids[table, text] = len(self._ids) + 1
            entry = getattr(packet.interned_data, table).add(iid=number)
            if table == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return number

    def _begun(self, state: int = _NEEDS_STATE) -> Any:
        """A new packet at the end of the trace."""
        if len(self._held.packet) >= CHUNK_PACKETS:
            self.close()
        return self._held.packet.add(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=state)
