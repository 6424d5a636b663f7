"""One file per promise: each is a command that prints JSON and keeps it in `benchmarks/results/`.

``python -m benchmarks.weights.delta`` runs one; ``python -m benchmarks`` runs the quick ones. Ratios are taken within
one run, since absolute times are noisy. Folders are subjects; what several subjects use stands at the root.
"""
