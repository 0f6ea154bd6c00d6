"""Many trials of many defences under one budget, and what they show of the trade-off.

`space` reads what is varied, `proposals` chooses the next settings, `trial` trains and attacks them
on validation images, `journal` keeps what is finished, `engines` runs trials side by side, `driver`
ties them together, `pareto` and `outcome` say what was found, `board` shows it. Nothing is imported
here: a worker of `engines` loads only what its work needs.
"""
