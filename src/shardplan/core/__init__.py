"""The nouns: mesh, layout, tensor type, op, program, and what they mean.

Reading order:

- `notation`        the scanner that every parser of the package shares
- `validation`      what a user's value must be, with one line where it is not
- `decoding`        files from elsewhere as text, JSON or TOML
- `dtypes`          the element types and their short names; reductions over them
- `digits`          numbers of places and tiles by their digits
- `mesh`            `Mesh`: named axes, sub-axes and device ids
- `layout`          `Layout`: which axes cut which dim, which are partial, which are root
- `box_table`       `BoxTable`: which device holds which boxes, for what no layout names
- `tensor`          `TensorType`: dtype, shape, layout, mesh; boxes; notation
- `shardings`       JAX's shardings as types, by their attributes alone
- `holders`         who sends what several devices hold: near holders in turn
- `messages`        who sends which box to whom, vectorised over devices
- `parcels`         the same where a `BoxTable` says what devices hold
- `message_totals`  what every device sends, receives and copies, without listing messages
- `pattern`         the communication of one op, as `hardware` prices it
- `lowering`        what a movement op lowers to: rounds of puts, takes, copies and folds, as data
- `group_rounds`    the rounds of collectives in groups; of slots of one size in `padded_rounds`
- `round_messages`  what a lowering costs, counted from its rounds
- `interpret`       a lowering run on all devices at once, with numpy
- `library_call`    `LibraryCall`: what a library of collectives can run itself
- `factor_rule`     how the dims of a compute op hang together, and its typing rule
- `rule_text`       such a rule as one line of text
- `expression_tree` the tree of an expression, its text, and its meaning on arrays
- `dialect`         which of the one notation is legal in an expression, and its reader
- `expression`      `Expression`: the language of elementwise ops, and what typing asks of it
- `derivative`      derivatives of expressions
- `namespace`       `Namespace`: what array libraries spell differently; numpy's has `contraction` and `error_function`
- `op`              `Op`: what every operation must say of itself
- `registry`        the table by which text names ops; those that other packages bring
- `step`            `Step`: one op applied to named values
- `text`            programs as text
- `parse`           programs from text
- `program`         `Program`: inputs, SSA steps, outputs; verified on construction
- `nested`          `Nested`: an op with a program in it
- `walk`            the walk over a program's steps and the bodies inside them
- `ops`             one frozen class per operation, with its typing rule and its meaning in numpy
- `program_builder` `ProgramBuilder`: steps while they are written
- `reshard_cotangent` the gradient of a move
- `gradients`       `gradients`: a program with its gradients
- `dim_names`       what the dims of a program's values are called
- `resizing`        `resize_dims`: a program in which dims have other sizes
- `rebase`          `rebase_program`: a program on other meshes
- `ids`             which inputs are ids, and what they may be
- `target_counts`   what a loss is a mean over; rows with weights in `loss_weights`
- `composite_patterns` composites that are written out as one step each
- `attention_pattern` `AttentionRule`: one of them
- `fusing`          where a program could be fused
- `reference`       `distribute`, `collect` and the numpy run that every other executor is compared with
- `part`            a part of a value's elements, run as the whole would be
- `accounting`      bytes live, moved and staged by a program

Words, here and in every room:

- *axis* of a mesh, *dim* of a tensor, *level* of the hardware;
- *place*: a device's index in mesh order. Arrays over the devices of one mesh have a row a place;
- *id*: the number that a mesh has at a place (`Mesh.devices`), and the same device in every mesh that has it. Patterns,
  scripts and timelines name devices by it;
- *device*, as an argument: a place, or coordinates over the axes, where a mesh or a type takes it, else an id;
- *topology id*: a device's number on a topology: its id, unless a placement lays it elsewhere (`Placement.position`);
- *unit*: a child at a level, numbered over the whole level; *port*: one of a unit's uplinks;
- *member*: k-th of a group of a collective, in the order of the group's axes, major to minor;
- *rank*: a process; *position*: an index along a dim, or of a character in a text.

This room imports numpy, ml_dtypes, the errors and `notebook`, and nothing else of the package.
"""

from shardplan.core.ops import OPS as OPS  # so that text names every op
