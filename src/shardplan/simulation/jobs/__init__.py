"""Op-level events of a `Job`: every stage's programs on the streams of its devices, in the order of the schedule.

Reading order:

- `settings`           `Fold` and `JobSettings`: what is folded, and what is assumed of hosts and streams
- `timing`             `TimedOp` and `TimedLoop`: the ops of a program with their seconds and streams, priced here
- `framework_ops`      what frameworks run beside, or as one kernel, where a program has one op after another
- `joint_passes`       a forward and a backward that run together: what of their exchanges with experts is left
- `streams`            a run of them on streams, in numbers or in rows of (max,+)
- `maps`               `ActionMap`: a program as a matrix of (max,+), from streams free to streams free again
- `compiled_job`       `CompiledJob`: a job on a fabric: which stages are alike, and the maps of their actions
- `messages`           `StageMessage`: what goes between stages, how long it takes and whom it is for
- `map_graph`          `MapGraph`: the graph of the schedule with a map at each node
- `sweep`              the schedule run over it, level by level: when each action begins and ends
- `holdings`           whose bytes they are when a device holds most
- `op_intervals`       actions as intervals of ops, and the chain of those that the makespan consists of
- `per_device_events`  the same job device by device, op by op, on shared links: what folding is held against
- `job_timeline`       `JobTimeline` and `simulate_job`
- `kineto`             a profiler's own trace as a `Timeline`
- `compare`            a predicted timeline beside a measured one, step by step

Source: arXiv 2111.05426, simulator; (max,+): Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity, 1992.
"""
