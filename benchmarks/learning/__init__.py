"""Whole training runs: time to a solve rate, controls, peers."""
