"""Pools: memory taken from upstream in large pieces, handed out in small ones, and kept for the next request."""
