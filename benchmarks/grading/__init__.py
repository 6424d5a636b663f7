"""What verdicts cost, and whether rewards are right."""
