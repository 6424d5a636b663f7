"""Benchmarks of reward terms."""
