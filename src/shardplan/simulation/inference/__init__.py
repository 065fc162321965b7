"""Requests to a model that serves: a prompt read at once, then tokens one by one, priced under many strategies at once.

Reading order:

- `requests`          `Requests`: a prompt, an output, sequences in flight; the forward steps that a model makes of them
- `forward`           what the stages of a forward step take, and the bytes that it has, at the closed form
- `form`              `RequestForm`: seconds to the first token, of each token and of a request, tokens a second, bytes
- `request_timeline`  the requests of one strategy, as a timeline
- `space`             `ServingSpace`: which strategies there are, as columns
- `serving_plans`     `ServingTask` and `ServingResult`: what a search for one is given, and finds
"""
