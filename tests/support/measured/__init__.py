"""Iterations of real clusters that other people measured, beside the planner's predictions.

    rows.py         the tables, as rows
    assumptions.py  what rows do not say, the same for all of them
    networks.py     row -> ONNX model, by its sizes
    clusters.py     row -> topology
    profiles.py     row -> computed profile, kept in a folder
    predict.py      row -> prediction, or the reason why there is none
    scores.py       rows and predictions -> errors

The tables lie beside the project (`tests/support/reference.py`) and are never copied into it.
"""
