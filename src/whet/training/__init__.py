"""The trainer that every algorithm extends (``trainer``), its ``callbacks`` and its ``loggers``."""
