"""Sources of models: Hugging Face folders, GGUF files, live modules, named arrays."""
