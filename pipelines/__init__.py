"""Data through engines: read, generate, price, write, on Ray. Knows nothing of CUDA."""
