"""Attention for training with the phase mask: forward and gradients over a packed row."""
