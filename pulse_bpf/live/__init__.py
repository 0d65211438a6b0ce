"""Live: agents on the nodes of a job, a collector that judges it while it runs, and what tells people about it."""
