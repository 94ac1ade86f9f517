"""What is done with a process reward model: policies, labels, search, judges, checks, reinforcement learning."""
