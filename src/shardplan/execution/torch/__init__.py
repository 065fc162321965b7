"""The backend over torch.distributed.

`run` is its entry; `steps` and `sums` bind ops to a rank, `pack` packs, `wire` sends, `compute` computes, `faults`
agrees and names who failed, `site` looks after waits, `tree` joins values of all ranks, `clock` joins clocks, `dtypes`
maps.
"""
