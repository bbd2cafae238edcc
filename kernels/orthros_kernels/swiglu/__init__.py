"""SwiGLU on the output of a fused gate and up projection."""
