"""Weights: how two sides store one model, and the plan that moves it from one to the other.

Reading order:

- `form`        how one parameter is stored, as an expression: products, sums and cuts of atoms
- `arithmetic`  sizes as arithmetic over a model's config
- `logical`     logical tensors: what the model means
- `table`       a table: the parameters that a framework stores, as data; the shipped ones are in `tables`
- `configs`     a model's config as one mapping, whichever way it says the same
- `frameworks`  which shipped table a word, a config and degrees mean
- `towers`      what a model that also sees or hears has beside, passed through
- `cuts`        the rules of a cut: which intervals an owner has
- `pieces`      what a device holds of one dim: boxes of digits at consecutive positions
- `lowering`    runs of one dim, at every coordinate
- `family`      one stored parameter, lowered
- `sizing`      sizes of degrees, meshes, atoms and tensors, and what follows for every parameter
- `binding`     tensors by name compared with what a rank should have
- `weights`     `Weights`: one side
- `replicas`    which elements a side holds more than once
- `contents`    what receivers hold and owners have along a dim, and how they overlap
- `spreading`   shares of owners that serve the same
- `relays`      receivers of one node that pass on
- `owners`      who sends what
- `blocks`      block scales stay with their blocks
- `state`       optimizer state, stored as its parameters are
- `limits`      the least seconds in which all can arrive
- `coverage`    the proof that every element has an owner
- `drops`       what a source stores and no target takes
- `regions`     strided blocks between named parameters, of one rank
- `reference`   a refit on numpy arrays
- `refit`       the verb
- `probe`       a table compared with what the framework's own loader makes
- `derive`      a table from what that loader makes
"""
