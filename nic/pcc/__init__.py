"""BlueField-3's programmable congestion control as a source: bytes per queue pair, counted on the card."""
