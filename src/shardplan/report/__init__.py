"""Results for people: pictures as text and as SVG, and what the command line prints.

- `contents` what every device holds before and after each step: the data of every picture
- `picture` the picture as text
- `canvas`  what the SVG pictures share
- `svg`     the picture as a standalone SVG file
- `timeline` timelines as tables, predicted beside measured
- `place`   rankings of placements, and reduction programs
- `audit`   what a launch's audit says; `placement_picture` and `placement_svg` draw where a mesh lies
- `lab_text` what the commands of the lab print, `lab_picture` what they draw
- `text`    the print-outs and JSON objects of the commands
"""
