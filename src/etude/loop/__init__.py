"""The training loop: the conductor, its child processes, and the code that connects all other packages.

This is the only package that imports all others; only `cli` imports it. Start reading in `conductor.py`.
"""
