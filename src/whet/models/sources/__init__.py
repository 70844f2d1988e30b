"""Where the weights of a model come from: a Hugging Face folder, a GGUF file, a live module."""
