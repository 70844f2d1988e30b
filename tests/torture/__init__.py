"""``make torture``: what holds of a run and of the core, whatever happens to them; docs/reliability.md says what."""
