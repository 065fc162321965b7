"""`Refit`: a refit prepared once and run at every step, between processes that share nothing but a store.

Reading order:

- `tensors`    the parameters of a live module, by the names of a table
- `hops`       from owners to receivers, and between receivers of a node
- `chunks`     what two ranks exchange, cut into messages that fit a memory limit
- `exchange`   staging, and views of both, made once; which messages are sent again, by a hash of each
- `meeting`    the store, who has come, two sides that know only themselves, and that all run one plan
- `commit`     one version for all ranks, or none; it is kept with the tensors that hold it
- `handle`     the handle
- `kernel_layouts`  what kernels keep in place of what was loaded: layouts for `finish=`
- `engine`     a server's weight-transfer engine over it, with plain dicts
"""
