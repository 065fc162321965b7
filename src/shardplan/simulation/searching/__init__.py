"""The search for the best strategy of a model on a topology, exact over a space that is stated.

Reading order:

- `space`        `StrategySpace`: which strategies there are, as columns: frames, and what varies inside one
- `bounds`       what a space and its prices are to a search; the least seconds and bytes of a frame of strategies
- `front`        the best few, and what nothing is better than in both
- `ranges`       a range of frames searched; journals of ranges
- `plans`        what results have in common: strategies as text and as JSON, why others were left out
- `sensitivity`  a search repeated with a part of the topology slower, or faster
- `search`       `search` and `SearchResult`
- `own_plans`    a schedule, or tables of layouts, of one's own, among what was searched
- `fit`          `fit`: whether one strategy fits, what takes the memory, and what near it would
"""
