"""Adapters of etude's machines for other frameworks. Each module imports one external package, and etude imports none
of them: users name them by import path."""
