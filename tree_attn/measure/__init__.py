"""Measures: latency, device time, links, memory, collectives in compiled programs, provenance, and rows of results."""
