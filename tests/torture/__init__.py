"""``make torture``: what is promised of a run and of the core whatever happens to them; docs/reliability.md says what."""
