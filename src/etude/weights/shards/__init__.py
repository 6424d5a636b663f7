"""Sharded weights: each rank publishes its own rows without a gather, and reads only the rows that it needs."""
