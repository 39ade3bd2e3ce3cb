"""Iterations of real clusters that other people measured, beside the planner's predictions.

    rows.py         the tables, as rows
    assumptions.py  what rows do not say, the same for all of them
    networks.py     row -> ONNX model, by its sizes
    clusters.py     row -> topology
    profiles.py     row -> computed profile, kept in a folder
    bounds.py       row -> the bound that no kernels beat
    recomputed.py   row -> what of a stage runs again, where no option says it
    sample.py       rows -> those that are predicted
    predict.py      row -> prediction, or the reason why there is none
    scores.py       rows and predictions -> errors
    marks.py        what the errors were when it was recorded, and what is worse
    page.py         rows and predictions -> docs/truth.md and its picture

The tables lie beside the project (`tests/support/reference.py`) and are never copied into it.
"""
