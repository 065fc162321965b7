"""The backend over `shard_map`.

`run` is its entry; `lower` and `compute` lower ops, `rounds` the general exchange, `wire` names devices, `bits` carries
what has no arithmetic, `parts` compiles, `kept` keeps executables by bytes; `agree` compares programs, `header` does so
at every run.
"""
