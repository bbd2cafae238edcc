"""The compute-bound engines and the workers that drive them; import from the modules."""
