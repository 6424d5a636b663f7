"""The parts of a run: ledger, traces, processes that are killed, Ray, the planner."""
