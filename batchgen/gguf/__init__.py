"""GGUF files: read, and converted once into what every other checkpoint is (config.json, safetensors, tokenizer).

A leaf: it needs numpy, gguf and tokenizers, never torch.
"""
