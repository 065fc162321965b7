"""Simulation: when every device does what, how long it takes, and how much memory it holds meanwhile.

Reading order:

- `interval`      `Interval` and `MemoryCurve`: the rows of a timeline, one thing that one device does or holds
- `timeline`      `Timeline`: intervals per device and stream, with the memory curve; predicted or measured, same type
- `trace`         timelines as a Perfetto / Chrome trace file, one or several over each other, and back
- `predict`       the closed form of a program: its longest path, each step as `hardware` prices it
- `jobs/`         op-level events of a `Job`: its programs on streams, stage by stage, with what it holds
- `script`        `Script`: what every device sends, receives and waits for, in order, in bytes
- `scripts`       the script of a program by engine: which messages its collectives are made of
- `engine`        tasks that wait for tasks and share resources fairly, on arrays
- `engine_tasks`  a program as tasks of the engine: groups, messages and kernels of every step that it runs
- `events`        the event simulation of a program: devices at their own pace, links shared fairly
- `replay`        the same of a script, message by message, as the lab's links would carry it
- `switch_tree`   `Tree`: a topology of switches as the lab builds it, link by link
- `sweep/`        a pipeline's schedule for many configurations at once: events of its stages, closed forms, bounds
- `closed/`       the closed form of a model's step: seconds and bytes under many strategies at once, from one reading
- `inference/`    requests to a model that serves, at the closed form: prompts, tokens, caches
- `steps`         a model's step under a strategy: the closed form, and events of its stages
- `step_events`   the steps of many strategies by the events of their stages
- `simulate`      the verb: programs, jobs, and models under a strategy
- `searching/`    the search for the best strategy of a model on a topology
- `accuracy/`     measured steps beside predictions: rows, errors, intervals, parameters fitted
- `validation`    predictions beside measured collectives: their errors by library, op, nodes and bytes
- `parity/`       DistIR's simulator, reproduced with its mistakes

This room imports `core`, `hardware`, `plans`, `strategy` and the errors, and numpy and msgspec.
"""
