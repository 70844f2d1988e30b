"""``make torture``: guarantees of runs and of the core under faults, as documented in docs/reliability.md."""
