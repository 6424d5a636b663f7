"""Deltas of weights, and what following them costs: bytes, time, late tokens, limited links."""
