"""Text generation without a terminal: model and tokenizer, conversations, thinking, models of runs and checkpoints."""
