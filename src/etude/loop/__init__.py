"""The one loop: the conductor, the children it supervises, and the wiring of every other folder.

The only folder that knows all the others; nobody imports it but `cli`. Read `conductor.py` first.
"""
