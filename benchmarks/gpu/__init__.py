"""Everything that needs a GPU; `python -m benchmarks.gpu` runs it all."""
