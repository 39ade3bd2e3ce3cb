"""What a forward leaves for its backward, where that is not what autograd alone would keep.

segments.py  segments that are run again in their backward, or whose activations wait elsewhere
offload.py   activations that wait in the host's memory
versions.py  versions of weights that minibatches in flight began with
"""
