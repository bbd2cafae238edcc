"""The whole service once, start to end, on a real document: `make demo`."""
