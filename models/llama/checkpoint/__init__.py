"""Checkpoints of Llamas: sources, safetensors folders and GGUF files, and their tokenizers."""
