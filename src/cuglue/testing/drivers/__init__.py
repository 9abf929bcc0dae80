"""The parts of :class:`cuglue.testing.DriverSuite`."""
