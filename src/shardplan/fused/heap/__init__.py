"""The symmetric heap: memory of the same layout on every rank, which every rank can write on every other one.

Reading order:

- `failures`   `FusedTimeout` and `PeerLost`: what ends a wait
- `peers`      a process as others recognise it, and whether it lives
- `segments`   the memory itself: shared between processes, or between threads of one
- `header`     the words that every heap begins with: abort, barrier, notes
- `symmetric`  `SymmetricHeap` and `SymmetricTensor`
"""
