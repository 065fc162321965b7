"""What fused operators compute on CPUs: tiles by PyTorch, and by one small C++ file where a compiler is there.

Reading order:

- `native`      the C++ file `tiles.cpp`, built on first use and cached; None where nothing can build it
- `shared_objects`  where built files are kept, and which are loaded: those that nobody else could have written
- `activation`  the activations of a fused product, and their gradients
- `bags`        bags of embedding rows, and their gradients
- `vectors`     products with a vector or a thin matrix
"""
