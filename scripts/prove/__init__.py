"""Proof by mutation: takes away, in turn, everything that keeps memory in order, and sees whether a test notices."""
