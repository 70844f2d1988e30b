"""Learning adapters natively, without torch: packed batches, and the learner of a packed base."""
