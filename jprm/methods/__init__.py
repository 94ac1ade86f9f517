"""What is done with a process reward model: readers of data, published models, benchmarks, policies, labels, search,
judges, checks, evidence, reinforcement learning, exports, kernels."""
