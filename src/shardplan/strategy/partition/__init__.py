"""From a model and a strategy to a job.

Reading order:

- `tables`      `Layouts`: what a strategy says of a model's names
- `parallel_styles` what is column- or row-parallel, in the words of those who know; torch's plans
- `style_tables` from those words to tables
- `decomposition` composed ops as their steps, where an axis cannot serve the whole
- `microbatch`  the program of a microbatch, forward and backward, cut into stages
- `flow`        its lines, in blocks
- `choices`     what a line may do with an axis
- `prices`      what ops and movements take
- `elimination` the least sum of tables, exactly
- `problem`     who makes and who wants every value
- `settle`      which choice every line takes
- `stages`      the lines of every stage, and what goes between them
- `write`       lines as programs, with planned movements
- `programs`    the programs of a stage: F, B, OPT
- `prefetch`    layers gather their parameters a layer early
- `job`         `Job`
- `job_order`   the order in which one process may run all actions of a job
- `partition`   `partition`
- `shares`      what an axis deals out of operations and bytes
- `serve_remedies` which line of the tables deals out what an axis does whole
- `annotated`   a program whose author says how its inputs and results lie, as a job
- `remedies`    which annotations remove a movement
"""
