"""Weights in shards: each rank publishes its own rows without a gather, and reads what it needs of them."""
