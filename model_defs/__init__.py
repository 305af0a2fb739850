"""Backbones in plain PyTorch, and the checkpoints that they are read from."""
