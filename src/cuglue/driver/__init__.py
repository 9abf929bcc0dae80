"""Drivers: the only code that talks to a device. ``protocol`` says what one is; ``cuda`` and ``sim`` are the two."""
