"""Simulated fleets of hosts, with costs that are measured here."""
