"""Sources of a model's weights: a Hugging Face folder, a GGUF file, a live module."""
