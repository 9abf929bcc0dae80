"""Programs that come with the library: ``python -m cuglue demo`` and ``python -m cuglue doctor``."""
