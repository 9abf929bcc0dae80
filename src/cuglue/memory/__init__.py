"""Device memory resources: where memory comes from, in layers that each change one thing, and CuPy's way into them."""
