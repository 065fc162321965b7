"""The nouns: mesh, layout, tensor type, op, program, and what they mean.

Reading order:

- `dtypes`     the element types and their short names
- `mesh`       named axes, sub-axes and device ids
- `layout`     which axes cut which dim, which are partial, which are root
- `tensor`     `TensorType`: dtype, shape, layout, mesh; boxes; notation
- `notation`   the scanner that every parser of the package shares
- `messages`   who sends which box to whom, vectorised over devices
- `pattern`    the communication of one op, as `hardware` prices it
- `ops`        one frozen class per operation, with its typing rule and its meaning in numpy
- `step`       one op applied to named values
- `text`       programs as text, and back
- `program`    inputs, SSA steps, outputs; verified on construction
- `reference`  `distribute`, `collect` and the numpy run that every other executor is compared with
- `accounting` bytes live, moved and staged by a program

This room imports numpy, ml_dtypes and the errors, and nothing else of the package.
"""
