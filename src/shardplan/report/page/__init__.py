"""Reports as one file of HTML: light and dark, nothing loaded from elsewhere.

Reading order:

- `page`         `PagePart` and `render_page`: parts in a page, with the script that draws figures inside it
- `figures`      figures of a step: its timeline, memory, bytes by level, alternatives, sensitivity
- `plan_page`    the report of a plan
- `other_pages`  those of a redistribution and of an audited launch
"""
