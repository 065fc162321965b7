"""What fused operators compute on CPUs: tiles by PyTorch, and by one small C++ file where a compiler is there.

Reading order:

- `native`      the C++ file `tiles.cpp`, built on first use and cached; None where nothing can build it
- `activation`  the activations of a fused product, and their gradients
- `bags`        bags of embedding rows, and their gradients
- `vectors`     products with a vector or a thin matrix
"""
