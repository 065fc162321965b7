"""Results for people: pictures as text, as SVG and as PNG, and what the command line prints.

Functions here take values and return texts and objects; only `lab_picture` writes a file, the PNG that it is given a
name for. Reading order:

- `fold`                 lines within 80 columns
- `contents`             what every device holds before and after each step: the data of its pictures
- `picture`              these contents as text
- `canvas`               what the SVG pictures share
- `svg`                  these contents as a standalone SVG file
- `placement_picture`    where a mesh lies, gathered from a placement or a launch, and as text
- `placement_svg`        the same as a standalone SVG file
- `timeline`             timelines as tables, predicted beside measured
- `timeline_comparison`  a predicted timeline beside a measured one, step by step and kind by kind
- `fusion`               which collectives were fused, and why not the others
- `place`                rankings of placements, and reduction programs
- `audit`                what a launch's audit says
- `measurements`         what `validate` and `calibrate` print
- `weights`              what the commands about weights print
- `lab_text`             what the commands of the lab print
- `lab_picture`          what they draw
- `page`                 reports as one file of HTML
- `notebook`             what a notebook shows of a value: parts of its report
- `text`                 what the commands about plans print, and the JSON of all
"""
