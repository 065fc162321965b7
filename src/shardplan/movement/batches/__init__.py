"""Many tensors as one plan (`batch`), and moves between meshes: send, relabel, gather behind (`crossings`)."""
