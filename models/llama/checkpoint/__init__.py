"""Opens Llama checkpoints: safetensors folders and GGUF files, their tokenizers, and where they come from."""
