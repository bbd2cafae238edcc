"""How much probability a set of queries gives to each key."""
