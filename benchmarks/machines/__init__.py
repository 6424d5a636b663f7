"""What isolated machines cost, and whether backends can be told apart."""
