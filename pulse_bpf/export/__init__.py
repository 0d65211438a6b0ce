"""`pulse export`: operators and findings as tables, and a recording as a timeline for Perfetto."""
