"""Runtime, commands, kernels, copies and futures: one way to issue work, with its ordering resolved."""
