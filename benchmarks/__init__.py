"""Measurements, each a module: `python -m benchmarks.NAME`. The last line printed is one JSON object of figures."""
