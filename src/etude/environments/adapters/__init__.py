"""Adapters that let other frameworks use etude's machines.

Each module imports one external package, and etude imports none of them: users name them by import path.
"""
