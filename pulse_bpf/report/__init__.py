"""One self-contained HTML page about a recording, for whoever was not there: `pulse report`."""
