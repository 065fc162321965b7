"""Simulation: when every device does what, how long it takes, and how much memory it holds meanwhile.

Reading order:

- `timeline`  `Timeline`: intervals per device and stream, with the memory curve; predicted or measured, same type
- `trace`     timelines as a Perfetto / Chrome trace file, one or several over each other, and back
- `predict`   the closed form of a program: its steps one after another, each as `hardware` prices it
- `script`    what every device sends, receives and waits for: `ring` makes it from a program, for the ring engine
- `tree`      a topology of switches as directed links, and the way of a message over them
- `events`    the event simulation of a script on a tree: devices at their own pace, links shared fairly

This room imports `core`, `hardware`, `movement`, `strategy` and the errors, and numpy and msgspec.
"""
