"""Attention states: their layout, where they are stored and how they travel."""
