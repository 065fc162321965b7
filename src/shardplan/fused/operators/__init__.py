"""The fused operators on local torch tensors of a rank, forward and backward, on CPUs.

Reading order:

- `call_context`     what all operators are asked beside their tensors: group, tiles, how long to wait
- `moving`           blocks that all ranks agreed to move, as operators make them or as they are: gradients
- `gemm`             a product whose blocks of rows or columns go to all ranks
- `gemv`             a thin product whose addends are summed on all ranks
- `tensor_parallel`  a product of rows that all ranks gather, and a product whose addends are scattered and summed
- `grouped`          products of several experts of a rank, of uneven numbers of rows
- `embedding`        bags of embedding rows, of each rank's tables for its batch, to the ranks of the batch
"""
