"""Results for people: pictures as text and as SVG, and what the command line prints.

- `frames`  what every device holds before and after each step: the data of every picture
- `picture` the picture as text
- `svg`     the picture as a standalone SVG file
- `verify`  a plan against its certificate and, executed, against the reference
- `text`    the print-outs and JSON objects of the commands
"""
