"""Root-mean-square norm, alone or together with the residual sum before it."""
