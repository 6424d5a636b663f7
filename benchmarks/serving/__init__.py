"""The gateway, agent programs behind it, and production beside rollouts."""
