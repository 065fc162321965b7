"""Frameworks' own loaders, run on the CPU at several degrees, for `benchmarks.weights_loaders`.

- `cases`: what a loader is asked: the table it reads, the table it must agree with, sizes and degrees.
- `ranks`: ranks as forked processes over gloo, each of which loads and gives what it then has.
- `vllm_live`: live weights to the models of vLLM's workers, by `examples/vllm_engine.py`.
- `titan`, `peft`, `megatron`, `vllm`, `sglang`: one framework each; importing the module imports the framework. Each
  has `CASES`, `LEFT` (tables of the framework that its loader is not asked about, and why) and `loaded`.
"""
