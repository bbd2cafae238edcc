"""Prefill mode: sinks and a block-aligned causal window."""
